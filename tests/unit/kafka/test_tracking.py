"""The tracking topic: its last manifest, and the brokers' answers that count."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError

from outbox_core.errors import TrackingTopicError
from outbox_core.kafka import tracking
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.tracking import ForeignLedger, ManifestNotRead, opening_key, read_ledger, write_barrier
from outbox_core.kafka.transactions import Ended

_ID = "kafka-outbox:d.s.t"
_OPENING = Opening("d.s.t", 1, 9, ("orders",), "7")


class Message:
    """A record, or with an error an answer of librdkafka."""

    def __init__(self, offset, key=None, value=None, error=None):
        self._offset, self._key, self._value, self._error = offset, key, value, error

    def topic(self):
        return "t"

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def key(self):
        return self._key

    def value(self):
        return self._value

    def error(self):
        return self._error

    def timestamp(self):
        return 1, 5_000


def manifest(offset, *ids):
    """Return the manifest of a batch."""
    return Message(offset, _ID.encode(), Manifest("d.s.t", ids, ids, "7").encode())


def opening(offset):
    """Return the opening of a batch."""
    return Message(offset, opening_key(_ID).encode(), _OPENING.encode())


def end(offset):
    """Return the end of the partition, as a broker reports it."""
    return Message(offset, error=KafkaError(KafkaError._PARTITION_EOF))


class Consumer:
    """A client that gets the given answers, from the requested offset on."""

    def __init__(self, answers):
        self._answers = answers
        self._left = []
        self.closed = False

    def assign(self, places):
        self._left = [answer for answer in self._answers if answer.offset() >= places[0].offset]

    def consume(self, *_):
        return [self._left.pop(0)] if self._left else []

    def close(self):
        self.closed = True


@pytest.fixture
def read(monkeypatch):
    """Read a topic up to a barrier; the settings of the client are remembered."""
    seen = SimpleNamespace(settings=None)

    def read(answers, barrier):
        patience = iter(range(300))

        def make(settings):
            seen.settings = settings
            return Consumer(answers)

        monkeypatch.setattr(tracking, "make_consumer", make)
        return read_ledger({}, "group", "t", 0, _ID, end=barrier, give_up=lambda: next(patience, None) is None)

    read.seen = seen
    return read


def test_the_last_manifest_before_the_barrier(read):
    """Only the last manifest before the barrier counts, and no opening that has a manifest behind it."""
    ledger = read([manifest(0, 1), opening(2), manifest(3, 2, 3), end(5)], 5)
    assert list(ledger.manifest.ids) == [2, 3]
    assert ledger.opening is None
    assert not ledger.foreign


def test_an_empty_topic_has_no_manifest(read):
    """A topic without a committed manifest has none."""
    assert read([end(3)], 3) == tracking.Ledger()
    assert read([], 0) == tracking.Ledger()


def test_a_torn_transaction_has_an_opening_alone(read):
    """A torn transaction's opening is returned with its time, and the manifest before it still counts."""
    ledger = read([manifest(0, 1), opening(2), end(4)], 4)
    assert list(ledger.manifest.ids) == [1]
    assert (ledger.opening.first, ledger.opening.last, ledger.opening.topics) == (1, 9, ("orders",))
    assert (ledger.opening.server, ledger.opening.written_at_ms) == ("7", 5_000)


def test_a_deposed_leader_is_not_believed(read):
    """The end that a deposed leader reports lies before the barrier, and is no answer."""
    with pytest.raises(ManifestNotRead):
        read([manifest(0, 1), end(2)], 5)


def test_the_true_leader_is_waited_for(read):
    """An early end is skipped, and records behind it count."""
    assert list(read([manifest(0, 1), end(2), manifest(3, 2), end(5)], 5).manifest.ids) == [2]


def test_a_manifest_far_back_is_found(read):
    """A manifest is found before the holes of a thousand aborted transactions."""
    assert list(read([manifest(3, 1), end(5_000)], 5_000).manifest.ids) == [1]


def test_a_strangers_record_is_told(read):
    """A foreign record behind the last manifest is reported; one before it is history. Barriers are ours."""
    ledger = read([manifest(0, 1), Message(2, b"stranger", b""), end(4)], 4)
    assert list(ledger.manifest.ids) == [1]
    assert "b'stranger' at offset 2" in ledger.foreign
    assert not read([Message(0, b"stranger", b""), manifest(2, 1), end(4)], 4).foreign
    assert not read([Message(0, f"{_ID}:barrier".encode(), b""), end(4)], 4).foreign


def test_what_cannot_be_read_is_no_manifest(read):
    """An unreadable manifest or opening is an error, as its rows would be deleted."""
    with pytest.raises(ForeignLedger, match="no manifest"):
        read([Message(0, _ID.encode(), b"x"), end(2)], 2)
    with pytest.raises(ForeignLedger, match="opening"):
        read([Message(0, opening_key(_ID).encode(), b'{"v":1}'), end(2)], 2)


@pytest.mark.parametrize(
    ("code", "text"),
    [("TOPIC_AUTHORIZATION_FAILED", "READ on it"), ("GROUP_AUTHORIZATION_FAILED", "READ on group")],
)
def test_a_missing_right_is_named(read, code, text):
    """A missing right is named, and the reader uses the group that is needed anyway."""
    with pytest.raises(TrackingTopicError, match=text):
        read([Message(0, error=KafkaError(getattr(KafkaError, code)))], 2)
    assert read.seen.settings["group.id"] == "group"
    assert read.seen.settings["isolation.level"] == "read_committed"


class Producer:
    """A producer that has the barrier acknowledged at an offset, if it `arrives`."""

    failure = None

    def __init__(self, offset, *, arrives=True):
        self.manifest_offset, self._arrives = offset, arrives

    def begin(self):
        return None

    def send_manifest(self, *_, **__):
        return None

    def all_arrive(self, *_):
        return self._arrives


def test_a_barrier_without_an_offset_is_none():
    """Without an acknowledgement that tells the barrier's offset the end is unknown, and the term ends."""
    assert write_barrier(Producer(7), "t", 0, _ID, lambda: False) == 7
    assert isinstance(write_barrier(Producer(-1), "t", 0, _ID, lambda: False), Ended)
    assert isinstance(write_barrier(Producer(7, arrives=False), "t", 0, _ID, lambda: False), Ended)


def test_a_manifest_ends_the_torn_transaction_before_it(read):
    """Records before a manifest were settled before it: neither its opening nor a stranger's record counts."""
    ledger = read([opening(0), Message(1, b"stranger", b""), manifest(2, 1), end(4)], 4)
    assert (ledger.opening, ledger.foreign) == (None, "")


def test_records_that_are_gone_are_not_taken_for_none(read):
    """A broker that has no longer what was asked for may have lost the last manifest: the topic was not read."""
    with pytest.raises(ManifestNotRead):
        read([Message(0, error=KafkaError(KafkaError._AUTO_OFFSET_RESET)), end(2)], 2)
    with pytest.raises(ManifestNotRead):
        read([Message(0, error=KafkaError(KafkaError._FATAL, "broken", fatal=True)), end(2)], 2)
