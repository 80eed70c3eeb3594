"""A consumer loop that runs a handler once for each record, through repeats and crashes.

For each record, in this order:

1. begin a transaction;
2. accept the record by its id (`outbox_core.inbox`); a repeat skips the next two steps;
3. run the handler in the transaction;
4. confirm that the transaction can commit what was accepted: the handler may have caught the error that aborted it;
5. commit the transaction, and look once, at the first record, whether the acceptance is there;
6. only then commit the record's offset.

A process that dies before 5 leaves neither the acceptance nor the handler's work: the record comes again, and is
accepted. One that dies between 5 and 6, or loses the partition there, makes the record come again as a repeat. If
a handler outlives its partition, the next owner's accept waits for its outcome. The offset is a bookmark: a failure to
commit it costs a repeat, never a record. A client that commits offsets of unhandled records would break this, so
a consumer without `enable.auto.offset.store` off is refused before the first handler runs.

**The source** of an acceptance is by default the consumer group: two groups that read one topic into one database each
do work of their own for the same record. As one source, the second would drop the records of the first.

**The id** is the record's last `outbox-id` header, which names the outbox besides the row. A record without one is
known by its place, `topic-partition-offset`, which recognises repeated reads of this group, but not repeated writes of
a producer. Places have no colon and outbox ids have one.

**Writers of a topic are trusted with its ids.** A forged `shop.public.outbox:1043` makes the real record a repeat
before it was handled. `outboxes` says which outboxes feed which topic, so that a group need not trust the writers of
one topic with the ids of another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypedDict, TypeVar

from outbox_core import tracing
from outbox_core.claims.claims import ClaimMissing, ClaimStore
from outbox_core.errors import InvalidConfig, InvalidMessageId, UnsafeConsumer, refuse_unfinished
from outbox_core.inbox import Inbox, inbox_key
from outbox_core.kafka.clients import Consumer, KafkaError, KafkaException, Message, TopicPartition
from outbox_core.kafka.errors import MEMBER_RECOVERS
from outbox_core.kafka.messages import UnreadableHeaders, bring_back, headers_of

__all__ = [
    "ID_HEADER",
    "Acceptor",
    "ConsumeOptions",
    "Consumed",
    "Outboxes",
    "RetryPolicy",
    "backoff",
    "consume",
    "group_of",
    "message_id_of",
]

ID_HEADER = "outbox-id"

Transaction = TypeVar("Transaction")
Transaction_contra = TypeVar("Transaction_contra", contravariant=True)
RetryPolicy = Callable[[Exception, int], float | None]
"""(error of the handler or the database, attempts so far) -> seconds to wait before the next one; None: raise."""

Outboxes = Mapping[str, Collection[str]]
"""Topic -> names of the outboxes that feed it."""

_POLL_SECONDS = 0.2
_MOST_STRANGERS = 100
_GROUP_METADATA = b"CGMDv2:"
_GENERATION_BYTES = 4


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Consumed:
    """The numbers of records that a call of `consume` accepted and handled, and of repeats accepted before."""

    handled: int
    repeats: int


class Acceptor(Protocol[Transaction_contra]):
    """An inbox, as `consume` uses it, for transactions of one kind."""

    def accept(self, transaction: Transaction_contra, source: str, message_id: str, /) -> bool:
        """Accept a message; return False for a repeat, of which all is committed."""

    def confirm(self, transaction: Transaction_contra, source: str, message_id: str, /) -> None:
        """Make sure that the transaction can commit what it has accepted, or raise `AcceptanceLost`."""


class ConsumeOptions(TypedDict, total=False):
    """Options of `consume` that adapters hand on; `consume` explains them."""

    source: str | None
    id_header: str
    outboxes: Outboxes | None
    commit: Literal["sync", "stored"]
    claim_store: ClaimStore | None
    on_missing_claim: Literal["raise", "skip"]
    retry: RetryPolicy | None
    max_records: int | None
    stop: threading.Event | None


def consume(
    consumer: Consumer,
    handler: Callable[[Transaction, Message], object],
    transaction: Callable[[], AbstractContextManager[Transaction]],
    *,
    inbox: Acceptor[Transaction] | None = None,
    source: str | None = None,
    id_header: str = ID_HEADER,
    outboxes: Outboxes | None = None,
    commit: Literal["sync", "stored"] = "sync",
    claim_store: ClaimStore | None = None,
    on_missing_claim: Literal["raise", "skip"] = "raise",
    retry: RetryPolicy | None = None,
    max_records: int | None = None,
    stop: threading.Event | None = None,
) -> Consumed:
    """Handle each record once, until told to stop.

    Args:
        consumer: subscribed or assigned by the caller, who also closes it. `enable.auto.offset.store` must be False;
            `enable.auto.commit` too, unless `commit` is "stored". Rebalances happen between records.
        handler: called with the transaction and the record, once for each record that is accepted.
        transaction: makes a context manager that begins a transaction, commits at its end, and rolls back when an
            exception leaves it; by default its value is a DB-API connection. A handler's exception that it swallows,
            such as `psycopg.Rollback`, is raised nevertheless.
        inbox: accepts messages in a transaction; by default `Inbox("inbox")`.
        source: the source of the ids; by default the consumer's group.
        id_header: name of the header with the record's id; "" goes by topic, partition and offset alone.
        outboxes: for each topic the names of the outboxes that feed it, such as `shop.public.outbox`. A record of such
            a topic with another outbox's id, or one that cannot be read, is known by its place. Without an entry every
            id is believed.
        commit: "sync" commits the offset after each record. "stored" leaves that to the client, which commits now and
            then (`enable.auto.commit` True) and at the end: faster, for a few more repeats after a crash.
        claim_store: where producers with `claim_check_above` put large payloads: the handler finds them in
            `message.value()`, as if they had come with the record.
        on_missing_claim: "skip" accepts a record whose payload is not in the store, or that was given none, without
            handling it, and logs its place. Whoever may write to the topic can send such a record, at which a group
            stands still with "raise".
        retry: the pause after an error of the handler or the database, see `backoff`; by default it is raised. All
            attempts at one record together must stay below `max.poll.interval.ms`.
        max_records: return after so many records, repeats included; None for no limit.
        stop: return once this is set, after the record in hand.

    Raises:
        UnsafeConsumer: if the consumer stores offsets by itself; no record was handled.
        InvalidConfig: if there is no source, or an entry of `outboxes` has no names; or if `transaction` does not
            commit, as seen in a second one after the first record that was handled.
        InvalidMessageId: if a record's id cannot be read, and its topic has no entry in `outboxes`; the consumer is set
            back to it. `id_header=""` handles it by its place.
        KafkaException: if the consumer cannot recover.
        ClaimMissing: if a record's payload is in a claim store that does not have it, or that was not given.
        OutboxError: if the handler returns a coroutine or a generator, whose work would never be done.
        AcceptanceLost: if the handler caught an error of the database outside a savepoint, or ended the transaction.
        Exception: of the handler, the database or the claim store. The record's transaction is rolled back, its offset
            is not committed, and the consumer is set back to it.
    """
    source = source if source is not None else group_of(consumer)
    loop = _Loop(consumer, id_header, _believed(outboxes), commit)
    _one_of(("raise", "skip"), on_missing_claim, "on_missing_claim")
    acceptor: Acceptor[Transaction] = inbox or Inbox()  # type: ignore[assignment]
    inbox_key(source, "any")
    transactions = _Transactions(transaction)
    stop = stop or threading.Event()

    def attempt(message: Message, message_id: str) -> bool:
        def work(begun: Transaction) -> bool:
            accepted = acceptor.accept(begun, source, message_id)
            if accepted:
                if _has_payload(message, claim_store, on_missing_claim):  # not for repeats, whose payloads may be gone
                    refuse_unfinished(handler(begun, message), message.topic())
                acceptor.confirm(begun, source, message_id)
            return accepted

        with _process_span(consumer, message, message_id):
            accepted = transactions.run(work)
            if accepted:
                transactions.refuse_lost(lambda begun: acceptor.accept(begun, source, message_id))
            return accepted

    handled = repeats = 0
    try:
        while not stop.is_set() and (max_records is None or handled + repeats < max_records):
            message = loop.next_record()
            if message is None:
                continue
            accepted = loop.work_on(message, attempt, retry, stop)
            if accepted is None:
                break
            handled, repeats = handled + accepted, repeats + (not accepted)
            loop.bookmark(message)
    finally:
        loop.end()
    return Consumed(handled, repeats)


def backoff(attempts: int, *, first: float = 0.1, longest: float = 10.0) -> RetryPolicy:
    """Return a policy that gives up after so many attempts at one record, with pauses that double, in seconds."""

    def pause(_: Exception, made: int) -> float | None:
        return None if made >= attempts else min(longest, first * 2 ** min(made - 1, 30))

    return pause


def message_id_of(message: Message, id_header: str = ID_HEADER) -> str:
    """Return the id of a record: the last header of that name, else topic, partition and offset.

    Raises:
        InvalidMessageId: if the header is not UTF-8, too long or contains NUL, or the headers cannot be read.
    """
    headers = headers_of(message)  # also without an id header: the handler may call `message.headers()` after it
    if id_header and isinstance(headers, UnreadableHeaders):
        raise InvalidMessageId("the record has a header name that is not UTF-8, so its headers cannot be read")
    values = [value for name, value in headers if name == id_header]
    if not id_header or not values or not values[-1]:
        return _id_by_place(message)
    return inbox_key("any", values[-1])[1]


def group_of(consumer: Consumer) -> str:
    """Return the consumer's `group.id` from its serialised group metadata; raise InvalidConfig if it is not there."""
    metadata = consumer.consumer_group_metadata()
    if isinstance(metadata, bytes) and metadata.startswith(_GROUP_METADATA):
        group, end, _ = metadata[len(_GROUP_METADATA) + _GENERATION_BYTES :].partition(b"\0")
        if group and end:
            return group.decode()
    raise InvalidConfig("this consumer does not tell its group.id; pass source=")


def _has_payload(message: Message, claim_store: ClaimStore | None, on_missing: str) -> bool:
    """Fetch a payload that is in a claim store; return False if it is missing, and its record to be skipped."""
    try:
        bring_back(message, claim_store)
    except ClaimMissing as error:
        if on_missing == "raise":
            raise
        _log.error("%s is skipped: %s", _place(message), error)
        return False
    return True


def _one_of(choices: Collection[str], choice: str, name: str) -> None:
    if choice not in choices:
        raise InvalidConfig(f"{name}: expected {' or '.join(map(repr, choices))}, got {choice!r}")


def _process_span(consumer: Consumer, message: Message, message_id: str) -> AbstractContextManager[None]:
    """Return the span of an attempt at a record, from before its transaction begins until after its end."""
    spans = tracing.active()
    if spans is None:
        return nullcontext()
    from outbox_core.tracing.spans import of_message

    group = None
    with suppress(InvalidConfig):  # a consumer of another make, whose group nobody needs for more than this
        group = group_of(consumer)
    attributes = of_message(
        message.key(),
        message.value(),
        message_id=message_id,
        partition=message.partition(),
        offset=message.offset(),
        group=group,
    )
    return spans.process(message.topic() or "", headers_of(message), attributes)


class _Transactions(Generic[Transaction]):
    """The transactions of a call of `consume`, by the context managers of its caller."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Transaction]]) -> None:
        self._begin = begin
        self._commit = False  # as has been seen

    def run(self, work: Callable[[Transaction], bool]) -> bool:
        """Return the answer of work in a transaction, or raise its error, even one that the context manager swallows.

        psycopg, for one, ends a block without an error at `psycopg.Rollback`.
        """
        failure: BaseException | None = None
        try:
            with self._begin() as begun:
                try:
                    return work(begun)
                except BaseException as error:
                    failure = error
                    raise
            raise failure
        finally:
            failure = None  # its traceback has this frame

    def refuse_lost(self, accept: Callable[[Transaction], bool]) -> None:
        """Raise InvalidConfig if what was accepted is new to a second transaction, unless one was found committed."""

        def look(begun: Transaction) -> bool:
            if accept(begun):
                raise InvalidConfig(
                    "transaction: its context manager has committed nothing, though it ended without an error: it has "
                    "to begin a transaction and to commit it (psycopg: `psycopg.connect(dsn)` does, `closing(...)` of "
                    "it does not; SQLAlchemy: `sessions.begin` and `engine.begin`, not `engine.connect`)"
                )
            return True

        self._commit = self._commit or self.run(look)


class _Loop:
    """The consumer of a call of `consume`: reads, retries, seeks back and commits offsets. Used by one thread."""

    def __init__(
        self,
        consumer: Consumer,
        id_header: str,
        outboxes: Mapping[str, frozenset[str]],
        commit: Literal["sync", "stored"],
    ) -> None:
        _one_of(("sync", "stored"), commit, "commit")
        self._consumer = consumer
        self._id_header = id_header
        self._outboxes = outboxes
        self._strangers: set[str] = set()
        self._commit = commit
        self._is_safe = False

    def next_record(self) -> Message | None:
        message = self._consumer.poll(_POLL_SECONDS)
        if message is None:
            return None
        error = message.error()
        if error is None:
            return message
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
            return None
        if error.fatal() or not (error.retriable() or error.code() in MEMBER_RECOVERS):
            raise KafkaException(error)
        _log.warning("consumer: %s", error.str())
        return None

    def work_on(
        self,
        message: Message,
        attempt: Callable[[Message, str], bool],
        retry: RetryPolicy | None,
        stop: threading.Event,
    ) -> bool | None:
        """Attempt it until it succeeds; return its answer, or None when told to stop between two attempts."""
        self._refuse_unsafe(message)
        message_id = self._id_of(message)
        attempts = 0
        while True:
            try:
                return attempt(message, message_id)
            except Exception as error:
                attempts += 1
                pause = retry(error, attempts) if retry is not None else None
                if pause is None:
                    self._set_back(message)
                    error.add_note(f"while handling {_place(message)}, attempt {attempts}")
                    raise
                _log.warning("attempt %d at %s failed: %r", attempts, _place(message), error)
            except BaseException:
                self._set_back(message)
                raise
            if stop.wait(pause):
                self._set_back(message)
                return None

    def _id_of(self, message: Message) -> str:
        believed = self._outboxes.get(message.topic() or "")
        place = _id_by_place(message)
        try:
            message_id = message_id_of(message, self._id_header)
        except InvalidMessageId as error:
            if believed is not None:
                self._tell_of_stranger("", message, f"header {self._id_header}: {error}")
                return place
            self._set_back(message)
            raise InvalidMessageId(f"header {self._id_header} of {_place(message)}: {error}") from None
        except Exception:
            self._set_back(message)  # whatever the reason: the next record's offset must not be committed
            raise
        outbox = message_id.rpartition(":")[0]
        if believed is None or outbox in believed or message_id == place:
            return message_id
        self._tell_of_stranger(
            outbox, message, f"an id of outbox {outbox!r}, which `outboxes` does not name for its topic"
        )
        return place

    def _tell_of_stranger(self, outbox: str, message: Message, what: str) -> None:
        if outbox not in self._strangers and len(self._strangers) < _MOST_STRANGERS:
            self._strangers.add(outbox)
            _log.warning("%s is known by its place: %s", _place(message), what)

    def bookmark(self, message: Message) -> None:
        """Commit the offset after a record, or hand it to the client to commit."""
        try:
            if self._commit == "stored":
                self._consumer.store_offsets(message=message)
            else:
                _raise_first(self._consumer.commit(message=message, asynchronous=False))
        except KafkaException as error:
            _forgive(error, f"{_place(message)} is handled, and will be seen again: its offset was not committed")

    def end(self) -> None:
        if self._commit == "stored" and self._is_safe:
            try:
                _raise_first(self._consumer.commit(asynchronous=False))
            except KafkaException as error:
                _forgive(error, "the last offsets were not committed")

    def _refuse_unsafe(self, message: Message) -> None:
        """Store the offset that is the record's own, as not yet handled: only a safe client lets itself be told."""
        if self._is_safe:
            return
        try:
            self._consumer.store_offsets(offsets=[_position(message)])
        except KafkaException as error:
            if error.args[0].code() == KafkaError._INVALID_ARG:  # noqa: SLF001
                self._set_back(message)
                raise UnsafeConsumer(
                    "the consumer stores offsets when it hands out records, so it can commit records that were not "
                    "handled; make it with enable.auto.offset.store=False and enable.auto.commit=False"
                ) from None
            _forgive(error, f"{_place(message)} is of a partition that was taken away")
            return
        self._is_safe = True

    def _set_back(self, message: Message) -> None:
        try:
            self._consumer.seek(_position(message))
        except KafkaException as error:
            _log.info("%s: not set back: %s", _place(message), error.args[0].str())


def _raise_first(committed: list[TopicPartition] | None) -> None:
    for partition in committed or ():
        if partition.error is not None:
            raise KafkaException(partition.error)


def _forgive(error: KafkaException, what: str) -> None:
    """Log it; raise it if it will not pass, such as a missing right."""
    cause: KafkaError = error.args[0]
    if cause.fatal() or not (cause.retriable() or cause.code() in MEMBER_RECOVERS):
        raise error
    _log.info("%s: %s", what, cause.str())


def _believed(outboxes: Outboxes | None) -> Mapping[str, frozenset[str]]:
    for topic, names in (outboxes or {}).items():
        if isinstance(names, str | bytes) or not names:
            raise InvalidConfig(f"outboxes: expected names for topic {topic!r}, got {names!r}")
    return {topic: frozenset(names) for topic, names in (outboxes or {}).items()}


def _id_by_place(message: Message) -> str:
    return f"{message.topic()}-{message.partition()}-{message.offset()}"


def _position(message: Message) -> TopicPartition:
    return TopicPartition(message.topic(), message.partition(), message.offset())  # type: ignore[arg-type]


def _place(message: Message) -> str:
    return f"{message.topic()}[{message.partition()}] at offset {message.offset()}"
