"""The loop of `consume` with a stand-in for the consumer: its reaction to every kind of error."""

import threading
from contextlib import contextmanager, suppress

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_core.claims import CLAIM_HEADER, ClaimMissing
from outbox_core.consuming import Consumed, backoff, consume, group_of, message_id_of
from outbox_core.errors import InvalidConfig, InvalidMessageId, OutboxError, UnsafeConsumer

ODD = (b"\xff", b"billing:\0", b"billing:" + 2000 * b"1")


class Record:
    """A message, or an error in its place."""

    def __init__(self, offset=0, headers=None, error=None):
        self._offset, self._headers, self._error = offset, headers, error

    def topic(self):
        return "orders"

    def partition(self):
        return 3

    def offset(self):
        return self._offset

    def headers(self):
        return self._headers

    def value(self):
        return b""

    def set_value(self, value):
        raise AssertionError(value)

    def error(self):
        return self._error


class PlayedConsumer:
    """A consumer that hands out given messages; `log` has its calls, together with the transactions."""

    def __init__(self, *records, metadata=b"CGMDv2:\0\0\0\1billing\0member\0\1"):
        self.records = list(records)
        self.metadata = metadata
        self.log = []
        self.errors = {}

    def poll(self, _timeout):
        return self.records.pop(0) if self.records else None

    def consumer_group_metadata(self):
        return self.metadata

    def store_offsets(self, message=None, offsets=None):
        self._do("store" if message is not None else "probe", message.offset() + 1 if message else offsets[0].offset)

    def commit(self, message=None, asynchronous=True):
        assert asynchronous is False
        self._do("commit", message.offset() + 1 if message is not None else "stored")
        return []

    def seek(self, position):
        self._do("seek", position.offset)

    def _do(self, what, where):
        self.log.append((what, where))
        if what in self.errors:
            raise KafkaException(self.errors[what])


class Work:
    """Transactions and an inbox in memory."""

    def __init__(self, consumer):
        self.log = consumer.log
        self.accepted = set()
        self.confirmed = 0

    @contextmanager
    def transaction(self):
        kept = set(self.accepted)
        try:
            yield self
        except BaseException:
            self.accepted = kept
            self.log.append("rollback")
            raise
        self.log.append("end")

    def accept(self, _transaction, source, message_id):
        is_new = (source, message_id) not in self.accepted
        self.accepted.add((source, message_id))
        return is_new

    def confirm(self, _transaction, source, message_id):
        assert (source, message_id) in self.accepted
        self.confirmed += 1


def run(consumer, handler=lambda *_: None, *, work=None, **options):
    """Consume all records."""
    work = work or Work(consumer)
    options.setdefault("max_records", len([record for record in consumer.records if record.error() is None]))
    return consume(consumer, handler, work.transaction, inbox=work, **options)


def test_the_order_of_things():
    """The handler runs in the transaction, and the offset is committed after it; a repeat only moves the offset.

    A second transaction sees at the first record that its acceptance was committed.
    """
    consumer = PlayedConsumer(Record(5, [("outbox-id", b"o:1")]), Record(6, [("outbox-id", b"o:1")]))
    done = run(consumer, lambda _, message: consumer.log.append(("handle", message.offset())))
    assert done == Consumed(handled=1, repeats=1)
    assert consumer.log == [("probe", 5), ("handle", 5), "end", "end", ("commit", 6), "end", ("commit", 7)]


def test_stored_offsets():
    """With commit="stored" the client gets the offset after each record, and a commit at the end."""
    consumer = PlayedConsumer(Record(5), Record(6))
    run(consumer, commit="stored")
    assert consumer.log == [("probe", 5), "end", "end", ("store", 6), "end", ("store", 7), ("commit", "stored")]
    with pytest.raises(InvalidConfig, match="commit: expected 'sync' or 'stored', got 'async'"):
        run(PlayedConsumer(), commit="async")


def test_a_consumer_that_stores_by_itself_is_refused():
    """A client that stores its own offsets is refused before the handler runs."""
    consumer = PlayedConsumer(Record(5))
    consumer.errors["probe"] = KafkaError(KafkaError._INVALID_ARG)
    with pytest.raises(UnsafeConsumer, match=r"enable\.auto\.offset\.store=False"):
        run(consumer)
    assert consumer.log == [("probe", 5), ("seek", 5)]


def test_headers_that_cannot_be_asked_for():
    """If a record's headers cannot be read, it comes again, and its offset is not committed."""

    class Broken(Record):
        def headers(self):
            raise RuntimeError("no headers")

    consumer = PlayedConsumer(Broken(5), Record(6))
    with pytest.raises(RuntimeError, match="no headers"):
        run(consumer)
    assert consumer.log == [("probe", 5), ("seek", 5)]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_a_handler_that_raises(error):
    """If a handler raises, its transaction is rolled back, no offset is committed, and the record comes again."""
    consumer = PlayedConsumer(Record(5))
    work = Work(consumer)

    def fail(*_):
        raise error

    with pytest.raises(type(error)) as raised:
        run(consumer, fail, work=work)
    assert consumer.log == [("probe", 5), "rollback", ("seek", 5)]
    assert work.accepted == set()
    if isinstance(error, Exception):
        assert raised.value.__notes__ == ["while handling orders[3] at offset 5, attempt 1"]


async def _only_begun(_transaction, _record):
    """Would do the work if it was awaited."""


def _generating(_transaction, _record):
    yield


@pytest.mark.parametrize("handler", [_only_begun, _generating])
def test_work_that_is_only_begun_is_not_accepted(handler):
    """A handler that only begins its work is refused: its record would be accepted and committed, and never handled."""
    consumer = PlayedConsumer(Record(7))
    work = Work(consumer)
    with pytest.raises(OutboxError, match="the work is not done"):
        run(consumer, handler, work=work)
    assert work.accepted == set()
    assert ("seek", 7) in consumer.log
    assert ("commit", 8) not in consumer.log


def test_errors_that_the_transaction_swallows():
    """A handler's error that the context manager swallows, as psycopg does `Rollback`, is one: the record is undone."""
    consumer = PlayedConsumer(Record(5))
    work = Work(consumer)
    attempts = []

    @contextmanager
    def swallowing():
        with suppress(LookupError), work.transaction() as begun:
            yield begun

    def handler(*_):
        attempts.append(1)
        if len(attempts) < 3:
            raise LookupError("roll this back")

    def attempt(**options):
        return consume(consumer, handler, swallowing, inbox=work, max_records=1, **options)

    with pytest.raises(LookupError, match="roll this back"):
        attempt()
    assert consumer.log == [("probe", 5), "rollback", ("seek", 5)]
    consumer.records.append(Record(5))
    assert attempt(retry=backoff(2, first=0.001)) == Consumed(1, 0)
    assert consumer.log[3:] == [("probe", 5), "rollback", "end", "end", ("commit", 6)]


def test_a_transaction_that_does_not_commit():
    """A context manager that commits nothing is found out at the first record, whose offset is not committed."""
    consumer = PlayedConsumer(Record(5))
    work = Work(consumer)

    @contextmanager
    def closing_only():
        kept = set(work.accepted)
        yield work
        work.accepted = kept

    with pytest.raises(InvalidConfig, match="transaction: its context manager has committed nothing"):
        consume(consumer, lambda *_: None, closing_only, inbox=work, max_records=1)
    assert consumer.log == [("probe", 5), ("seek", 5)]


def test_retries():
    """A policy sets the pause before the next attempt; each attempt has a transaction of its own."""
    consumer = PlayedConsumer(Record(5))
    attempts = []

    def handler(*_):
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError("not yet")

    assert run(consumer, handler, retry=backoff(3, first=0.001)) == Consumed(1, 0)
    assert consumer.log == [("probe", 5), "rollback", "rollback", "end", "end", ("commit", 6)]


def test_retries_end():
    """After the last attempt the error is raised as without a policy."""
    consumer = PlayedConsumer(Record(5))

    def fail(*_):
        raise ValueError("never")

    with pytest.raises(ValueError, match="never"):
        run(consumer, fail, retry=backoff(2, first=0.001))
    assert consumer.log == [("probe", 5), "rollback", "rollback", ("seek", 5)]


def test_backoff():
    """Pauses double up to the longest, and end after the last attempt."""
    policy = backoff(6, first=1, longest=5)
    assert [policy(ValueError(), made) for made in range(1, 7)] == [1, 2, 4, 5, 5, None]
    assert backoff(10**6)(ValueError(), 10**5) == 10.0


def test_stop_between_two_attempts():
    """A stop that comes during a pause ends it, with the record set back."""
    consumer = PlayedConsumer(Record(5))
    stop = threading.Event()

    def fail(*_):
        stop.set()
        raise ValueError("stop")

    assert run(consumer, fail, retry=lambda *_: 60.0, stop=stop) == Consumed(0, 0)
    assert consumer.log == [("probe", 5), "rollback", ("seek", 5)]


def test_stop_after_the_record_in_hand():
    """A stop that comes while a record is handled lets it be finished, and its offset be committed."""
    consumer = PlayedConsumer(Record(5), Record(6))
    stop = threading.Event()
    assert run(consumer, lambda *_: stop.set(), stop=stop) == Consumed(1, 0)
    assert consumer.log[-1] == ("commit", 6)
    assert len(consumer.records) == 1


@pytest.mark.parametrize(
    "code",
    [KafkaError._PARTITION_EOF, KafkaError._MAX_POLL_EXCEEDED, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TRANSPORT],
)
def test_errors_that_pass(code):
    """Neither a passing error nor the end of a partition ends the loop."""
    consumer = PlayedConsumer(Record(error=KafkaError(code)), Record(5))
    assert run(consumer) == Consumed(1, 0)


@pytest.mark.parametrize(
    "error",
    [
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED),
        KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED),
        KafkaError(KafkaError._AUTO_OFFSET_RESET),
        KafkaError(KafkaError._TRANSPORT, "fatal", fatal=True),
    ],
)
def test_errors_that_do_not_pass(error):
    """An error that does not pass is raised."""
    with pytest.raises(KafkaException):
        run(PlayedConsumer(Record(error=error), Record(5)))


@pytest.mark.parametrize("commit", ["sync", "stored"])
@pytest.mark.parametrize(
    "code",
    [KafkaError.ILLEGAL_GENERATION, KafkaError._STATE, KafkaError._TIMED_OUT, KafkaError.UNKNOWN_TOPIC_OR_PART],
)
def test_a_commit_that_fails_because_the_partition_moved(code, commit):
    """A record whose offset cannot be committed counts as handled; the partition's next owner sees it again."""
    consumer = PlayedConsumer(Record(5), Record(6))
    consumer.errors = {"commit": KafkaError(code), "store": KafkaError(code)}
    assert run(consumer, commit=commit) == Consumed(2, 0)


def test_a_commit_that_may_not_be():
    """A missing right to commit is raised, as an error of the call and as one of the partition."""
    consumer = PlayedConsumer(Record(5))
    consumer.errors["commit"] = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaException):
        run(consumer)
    consumer = PlayedConsumer(Record(5))
    refused = type("Refused", (), {"error": KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)})
    consumer.commit = lambda **_: [refused]
    with pytest.raises(KafkaException):
        run(consumer)


def test_a_partition_that_is_gone_before_the_record_is_handled():
    """Neither the probe nor the seek back fails if the partition is no longer assigned."""
    consumer = PlayedConsumer(Record(5))
    consumer.errors = {"probe": KafkaError(KafkaError._STATE), "seek": KafkaError(KafkaError._STATE)}

    def fail(*_):
        raise ValueError("the handler's own")

    with pytest.raises(ValueError, match="the handler's own"):
        run(consumer, fail)


@pytest.mark.parametrize(
    ("headers", "header", "expected"),
    [
        ([("outbox-id", b"shop:1")], "outbox-id", "shop:1"),
        ([("outbox-id", b"theirs"), ("x", b"y"), ("outbox-id", b"ours")], "outbox-id", "ours"),
        ([("event-id", b"e1"), ("outbox-id", b"shop:1")], "event-id", "e1"),
        ([("x", b"y")], "outbox-id", "orders-3-5"),
        ([("outbox-id", None)], "outbox-id", "orders-3-5"),
        ([("outbox-id", b"")], "outbox-id", "orders-3-5"),
        (None, "outbox-id", "orders-3-5"),
        ([("outbox-id", b"shop:1"), ("", b"x")], "", "orders-3-5"),
    ],
)
def test_the_id_of_a_record(headers, header, expected):
    """The id of a record is its last header of the name, or else the record's place."""
    assert message_id_of(Record(5, headers), header) == expected


def test_an_id_that_cannot_be_kept():
    """A header that is no text stops before the handler, with header and place in the error; the record comes again."""
    consumer = PlayedConsumer(Record(5, [("outbox-id", b"\xff")]))
    with pytest.raises(InvalidMessageId, match=r"^header outbox-id of orders\[3\] at offset 5: message_id: bytes that"):
        run(consumer)
    assert consumer.log == [("probe", 5), ("seek", 5)]


def test_the_source():
    """The source is the group, unless another is given; a consumer that does not name its group needs one."""
    consumer = PlayedConsumer(Record(5), Record(6))
    work = Work(consumer)
    run(consumer, work=work, max_records=1)
    run(consumer, work=work, max_records=1, source="other")
    assert work.accepted == {("billing", "orders-3-5"), ("other", "orders-3-6")}
    with pytest.raises(InvalidMessageId, match="source: is empty"):
        run(consumer, source="")
    for metadata in (b"CGMDv9:\0\0\0\1billing\0", b"CGMDv2:\0\0\0\1billing", None):
        with pytest.raises(InvalidConfig, match="pass source="):
            group_of(PlayedConsumer(metadata=metadata))


def test_the_position_names_topic_and_partition():
    """After an error the record's own partition is set back."""
    consumer = PlayedConsumer(Record(5))
    positions = []
    consumer.seek = positions.append

    def fail(*_):
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        run(consumer, fail)
    assert positions == [TopicPartition("orders", 3, 5)]


def test_ids_of_strangers_are_not_believed():
    """An id counts only if its outbox feeds the topic; other records are handled, and known by their place."""
    forged = [Record(5, [("outbox-id", b"shop:1")]), Record(6, [("outbox-id", b"orders-3-7")]), Record(7)]
    consumer = PlayedConsumer(*forged, Record(8, [("outbox-id", b"billing:1")]))
    work = Work(consumer)
    assert run(consumer, work=work, outboxes={"orders": ["billing"], "others": ["shop"]}) == Consumed(4, 0)
    places = {f"orders-3-{offset}" for offset in (5, 6, 7)}
    assert work.accepted == {("billing", one) for one in {*places, "billing:1"}}


def test_ids_of_named_topics_that_cannot_be_kept(caplog):
    """Where outboxes are named, an id that no outbox writes is not believed either, and stops nothing."""
    consumer = PlayedConsumer(*[Record(5 + at, [("outbox-id", odd)]) for at, odd in enumerate(ODD)])
    work = Work(consumer)
    assert run(consumer, work=work, outboxes={"orders": ["billing"]}) == Consumed(len(ODD), 0)
    assert work.accepted == {("billing", f"orders-3-{5 + at}") for at in range(len(ODD))}
    (line,) = [line for line in caplog.messages if "known by its place" in line]
    assert "header outbox-id" in line
    assert "orders[3] at offset 5" in line
    consumer = PlayedConsumer(Record(5, [("outbox-id", ODD[0])]))
    with pytest.raises(InvalidMessageId):
        run(consumer, outboxes={"others": ["billing"]})


def test_topics_that_are_not_named_believe_every_outbox():
    """A topic without an entry takes ids as they come; a name alone, which would be letters, is refused."""
    consumer = PlayedConsumer(Record(5, [("outbox-id", b"shop:1")]))
    work = Work(consumer)
    run(consumer, work=work, outboxes={"others": ["billing"]})
    assert work.accepted == {("billing", "shop:1")}
    with pytest.raises(InvalidConfig, match="outboxes: expected names for topic 'orders', got 'shop'"):
        run(PlayedConsumer(), outboxes={"orders": "shop"})


def test_each_stranger_is_told_of_once(caplog):
    """An outbox that may not feed a topic is warned of once, with the remedy."""
    consumer = PlayedConsumer(*[Record(number, [("outbox-id", b"evil:%d" % number)]) for number in range(5, 9)])
    run(consumer, outboxes={"orders": ["billing"]})
    (line,) = [line for line in caplog.messages if "evil" in line]
    assert "orders[3] at offset 5" in line


def test_a_payload_that_is_missing(caplog):
    """A record that names no payload of the store raises, or is accepted and skipped, as the group has chosen."""
    record = Record(5, [(CLAIM_HEADER, f"x/20260101T000000Z-{'a' * 32}".encode())])
    with pytest.raises(ClaimMissing):
        run(PlayedConsumer(record), lambda *_: pytest.fail("it has no value"))
    consumer = PlayedConsumer(record, Record(6))
    handled = []
    done = run(consumer, lambda _, message: handled.append(message.offset()), on_missing_claim="skip")
    assert (done, handled) == (Consumed(handled=2, repeats=0), [6])
    assert "at offset 5 is skipped" in caplog.text
    assert consumer.log[-1] == ("commit", 7)
    with pytest.raises(InvalidConfig, match="on_missing_claim: expected 'raise' or 'skip', got 'drop'"):
        run(PlayedConsumer(Record(1)), on_missing_claim="drop")
