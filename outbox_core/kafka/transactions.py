"""A transactional producer for the harvester, queues and Spark, with all defences that transactions need.

librdkafka reports three kinds of trouble inside a transaction:

- it must be aborted (`Aborted`): none of it will ever be seen, and the producer can go on;
- the producer is fenced or otherwise broken (`Ended`): another process has taken the transactional.id, or the
  coordinator gave up a transaction that was open too long;
- the outcome is unknown (`Ended` too): a call timed out, or a broker says that the transaction is not open (it was
  *torn*: ended by something else). Only a new producer's `init_transactions()` settles it.

**EndTxn may arrive late.** librdkafka (2.16, no KIP-890 part 2) repeats an EndTxn whose connection was lost, in the
same epoch, and reports success. The first copy may still arrive and end a later transaction of that epoch. So no
transaction begins in an epoch in which librdkafka may have sent EndTxn twice:

- a repeat is never sent earlier than 0.8 x min(retry.backoff.ms, retry.backoff.max.ms) after the first copy
  (`rd_kafka_broker_buf_retry`: 20% jitter, then the cap). Here retry.backoff.ms is 500 at least;
- each commit and abort is timed, a commit from the moment when all records are acknowledged, as EndTxn is sent then;
- if that took long enough for a repeat, the next `begin` replaces the producer first: `init_transactions()` bumps the
  epoch, and brokers refuse requests of the old one.

This alone prevents losses and repeats (R13 of docs/explanation-exactly-once.md); openings, by which a torn transaction
is recognised (R14), alone prevent losses and not all repeats. A late copy of TxnOffsetCommit would replace later
offsets, so that call is timed likewise.

**So may Produce.** A record whose connection was lost waits for a repeat; an abort purges it, and librdkafka gives its
sequence number to the partition's next record (`rd_kafka_toppar_purge_queues`, "ADVBASE"). If the first copy reaches
the broker all the same, it takes one of the two for a repeat of the other: the aborted one is seen, or the next one is
lost, and both are acknowledged. So an abort of records that are not all acknowledged replaces the producer, too.
A record that timed out while it waited for its repeat is not outstanding any more, and without delivery reports only a
commit would tell (`_INCONSISTENT`). So does an abort of a transaction that is as old as records may get. A record whose
repeats have run out fails as silently, and at any age: so their number is not limited, whatever the settings say.

**A commit or abort that timed out is never called again**, though librdkafka allows it. If its own thread gets no CPU
for the time of a call, the call's requests to that thread stay in a queue, and what they return names no request: it
passes for the result of the next call (`rd_kafka_txn_curr_api_set_result`). A commit could succeed that was never sent;
or librdkafka forgets that one is under way, takes its answer for that of an abort, and ends the process. So records are
waited for before the commit, and EndTxn by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError, must
from outbox_core.kafka.clients import (
    KafkaConfig,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    discard,
    make_producer,
)
from outbox_core.kafka.errors import TORN, ErrorKind, explained, grant, is_collateral, kind_of, why_no_manifest

_INIT_ATTEMPT_SECONDS = 2.0
_QUEUE_FULL_POLL_SECONDS = 0.01
_REFUSED_POLL_SECONDS = 0.01
_PROBE_SECONDS = 0.1
_NO_TRANSACTION_LASTS_MS = 2**31 - 1
LOWER_TIMEOUT = "lower transactionTimeout (transaction_timeout), or raise the brokers' transaction.max.timeout.ms"
_OFFSETS_REPEAT_SECONDS = 0.5  # after which librdkafka repeats TxnOffsetCommit: rd_kafka_txn_handle_TxnOffsetCommit
_DEFAULT_TRANSACTION_TIMEOUT_MS = 60_000  # librdkafka's, which is that of records, too, if they have none
_REPEATS = ("retries", "message.send.max.retries")
_LEAST_BACKOFF_MS = 500
_BACKOFF_MAX_MS = 1000  # librdkafka's default of retry.backoff.max.ms
_EARLIEST_REPEAT = 0.7  # of the backoff; librdkafka's jitter leaves 0.8 of it at least, the rest is our margin

GiveUp = Callable[[], bool]
Headers = list[tuple[str, Any]]


def never() -> bool:
    """Never give up."""
    return False


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction that is in Kafka, whole."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """A transaction that is not in Kafka, after which the producer can begin another."""

    error: KafkaError | None  # of its first failed record, or else its own; None if it was our choice
    record_at_fault: bool  # a record or its destination may be the cause, not the cluster


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a producer, which leaves the outcome of its transaction to the next one."""

    reason: str
    cause: KafkaError | None = None  # of the abort that broke the producer, or of the manifest's refusal
    error: KafkaError | None = None  # any other error of Kafka
    is_expiry: bool = False  # the brokers have forgotten an idle transactional.id, and nothing was sent


Outcome = Committed | Aborted | Ended
ACKNOWLEDGEMENTS = "acknowledgements of records"  # the step in which a transaction waits for its records' brokers


def is_torn(error: KafkaError) -> bool:
    """Tell whether a broker says that our open transaction is not open."""
    return error.code() in TORN


class _Reports:
    """The delivery reports of one transaction, without a reference to the producer, which would make a cycle."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.error: KafkaError | None = None
        self.refusal: Ended | None = None
        self.offset = -1
        self.is_torn = False
        self.awaited: list[str] = []  # records of the protocol itself; a late report finds its own transaction's list

    @property
    def are_good(self) -> bool:
        """True if all records of the protocol itself were acknowledged, and no error is known."""
        return not self.awaited and self.refusal is None and not self.is_torn

    def note(self, error: KafkaError) -> None:
        self.is_torn = self.is_torn or is_torn(error)
        if self.error is None and not is_collateral(error):
            self.error = error

    def note_own(self, awaited: list[str], error: KafkaError | None, message: Message) -> None:
        """Note the report of a record of the protocol itself, such as a manifest."""
        if awaited:
            awaited.pop()
        if error is None:
            offset = message.offset()
            self.offset = -1 if offset is None else offset  # DUPLICATE_SEQUENCE_NUMBER tells none
            return
        self.note(error)
        if not is_collateral(error):
            self.refusal = Ended(why_no_manifest(message.topic(), error), error)


class TransactionalProducer:
    """A Kafka producer with a fixed transactional.id. Used by one thread.

    init -> (begin -> produce, send_offsets -> [all_arrive] -> commit or abort)* -> discard
    """

    def __init__(self, settings: Mapping[str, Any], *, timeout_seconds: float) -> None:
        backoff = max(_milliseconds(settings, "retry.backoff.ms", 0), _LEAST_BACKOFF_MS)
        longest = max(_milliseconds(settings, "retry.backoff.max.ms", _BACKOFF_MAX_MS), backoff)
        self._transactional_id = str(settings["transactional.id"])
        self._timeout = timeout_seconds  # of the records before a commit, of the commit itself, and of an abort
        self._earliest_repeat = _EARLIEST_REPEAT * backoff / 1000
        self._reports = _Reports()
        self._settings = {
            **{name: value for name, value in settings.items() if name not in _REPEATS},
            "retry.backoff.ms": backoff,
            "retry.backoff.max.ms": longest,
        }
        self._batching: Mapping[str, int] = {}
        self._give_up: GiveUp = never
        self.step: Callable[[str], AbstractContextManager[None]] = _unnoted
        """Entered with the name, for people, of each call that waits for Kafka."""
        self._must_replace = False
        self._record_timeout = _record_timeout(settings)
        self._began_at = 0.0
        self._producer: Any = self._make()

    @property
    def must_replace(self) -> bool:
        """True if the next `begin` will replace the producer, to bump its epoch or to change its settings."""
        return self._must_replace

    @property
    def failure(self) -> KafkaError | None:
        """The first error of the open transaction, as far as it is known."""
        return self._reports.error

    def _make(self) -> Any:
        # As a rule without delivery reports: they would cost more than all the rest, and the commit vouches for all.
        return make_producer({**self._settings, **self._batching})

    def init(self, give_up: GiveUp = never) -> Ended | None:
        """Fence the last owner of the transactional.id and wait until its transaction is settled, or return `Ended`.

        `give_up` is asked now and then, here and in a later `begin` that replaces the producer.
        """
        self._give_up = give_up
        why = ""
        while not give_up():
            try:
                with self.step("init_transactions"):
                    self._producer.init_transactions(_INIT_ATTEMPT_SECONDS)
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if not cause.retriable():
                    return Ended(self._why_refused(cause), error=cause)
                why = f": {cause.str()}"
            else:
                return None
        return Ended(f"init_transactions was given up{why}")

    def _why_refused(self, cause: KafkaError) -> str:
        if cause.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return f"{cause.str()}; {LOWER_TIMEOUT}"
        if cause.code() != KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return cause.str()
        grants = grant("WRITE and DESCRIBE", self._settings)
        return f"transactional.id {self._transactional_id!r} may not be used: {cause.str()}; {grants}"

    def discard(self) -> None:
        """End the producer's threads and connections. Idempotent."""
        producer, self._producer = self._producer, None
        self._give_up = never
        if producer is not None:
            discard(producer)

    def limit_batches(self, max_bytes: int | None, *, unbatched: bool = False) -> None:
        """Set librdkafka's `batch.size` from the next `begin` on, None for that of the settings.

        With `unbatched` each record is a batch of its own, so that its delivery report is about no other.
        """
        batches = {"batch.num.messages": 1} if unbatched else {} if max_bytes is None else {"batch.size": max_bytes}
        if batches != self._batching:
            self._batching = batches
            self._must_replace = True

    @property
    def is_unbatched(self) -> bool:
        """True if each record of a transaction that begins now is a batch of its own."""
        return "batch.num.messages" in self._batching

    def begin(self) -> Ended | None:
        """Open a transaction, with a new producer if a late EndTxn could meet it.

        A new producer fences the process that has fenced the old one. A caller that relies on being fenced if it has
        read stale data calls `replace` itself when `must_replace`, and reads again.
        """
        if self._must_replace:
            ended = self.replace(self._give_up)
            if ended is not None:
                return ended
        must(not self._must_replace, "a transaction must not begin in an epoch in which a request may be late")
        self._reports.clear()
        self._began_at = monotonic()
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            return Ended(error.args[0].str())
        return None

    def replace(self, give_up: GiveUp) -> Ended | None:
        """Replace the producer by a new one of the same transactional.id, in a new epoch."""
        self.discard()
        self._must_replace = True
        try:
            self._producer = self._make()
        except KafkaUnavailable as error:
            return Ended(str(error))
        ended = self.init(give_up)
        self._must_replace = ended is not None
        return ended

    # -- what goes into it

    def produce(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        partition: int = -1,
        headers: Headers | None = None,
        *,
        give_up: GiveUp = never,
        **more: Any,
    ) -> bool:
        """Add a record to the open transaction, or return False if `give_up` says so while the client's queue is full.

        Raises KafkaException if the client refuses the record, or the transaction has failed (code `_STATE`).
        """
        while True:
            try:
                self._producer.produce(topic, value, key, partition, headers=headers, **more)
            except BufferError:
                if give_up():
                    return False
                self._producer.poll(_QUEUE_FULL_POLL_SECONDS)  # raises if the producer has broken
            else:
                return True

    @property
    def manifest_offset(self) -> int:
        """Offset of the last acknowledged record of `send_manifest`, -1 if there is none yet."""
        return self._reports.offset

    def send_manifest(self, topic: str, value: bytes, partition: int = 0, *, key: str | None = None) -> Ended | None:
        """Add a record of the protocol itself: a refusal ends the transaction in `Ended`."""
        try:
            awaited = self._reports.awaited
            note = partial(self._reports.note_own, awaited)
            awaited.append(topic)
            self.produce(topic, value, key or self._transactional_id, partition, on_delivery=note)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() == KafkaError._STATE:  # noqa: SLF001  the commit will tell
                return None
            return Ended(f"the manifest was refused by the client's settings: {cause.str()}", cause)
        return None

    def send_offsets(self, positions: Sequence[TopicPartition], group_metadata: Any, timeout_seconds: float) -> None:
        """Add a consumer's positions to the transaction, or raise KafkaException if it has to be aborted."""
        # The coordinator refuses AddOffsetsToTxn while it still completes the last transaction, and librdkafka repeats
        # it only after retry.backoff.ms; AddPartitionsToTxn, which comes with the records, it repeats at once.
        if not self.all_arrive(timeout_seconds):
            raise KafkaException(self.failure or KafkaError(KafkaError._TIMED_OUT, "records were not acknowledged"))  # noqa: SLF001
        began = monotonic()
        try:
            self._producer.send_offsets_to_transaction(list(positions), group_metadata, timeout_seconds)
        finally:
            if monotonic() - began >= min(self._earliest_repeat, _OFFSETS_REPEAT_SECONDS):
                self._must_replace = True

    def all_arrive(self, timeout_seconds: float, give_up: GiveUp = never) -> bool:
        """Wait until all records are acknowledged, or return False after `timeout_seconds`, `give_up` or a failure."""
        # What failed is not outstanding any more, either.
        is_flushed = self._flush(timeout_seconds, give_up)
        return is_flushed and not self._has_transaction_failed() and self._reports.error is None

    def _flush(self, timeout_seconds: float, give_up: GiveUp) -> bool:
        """Wait until no record is outstanding or the transaction has failed. False if time or `give_up` ended that."""
        give_up_at = monotonic() + timeout_seconds
        with self.step(ACKNOWLEDGEMENTS):
            while True:
                left = give_up_at - monotonic()
                with suppress(KafkaException):  # a broken producer: the probe says so
                    if not self._producer.flush(max(0.0, min(_PROBE_SECONDS, left))):
                        return True
                if self._has_transaction_failed():
                    return True
                if left <= 0 or give_up():
                    return False

    def _has_transaction_failed(self) -> bool:
        # Changes nothing while one is open: raises its error if it has failed, and else `_STATE`: it is open.
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() == KafkaError._STATE and not cause.fatal():  # noqa: SLF001
                return False
            self._reports.note(cause)
        return True

    # -- its end

    def commit(self, give_up: GiveUp = never) -> Outcome:
        """Commit, or abort if it must be, and leave the outcome to the next producer once `give_up` says so.

        `give_up` is not asked while EndTxn is under way, which is for the producer's timeout at most.
        """
        if not self._flush(self._timeout, give_up):
            return Ended("records were not acknowledged in time, and the commit was not sent")
        try:
            with self.step("the commit of a transaction"):
                self._end(self._producer.commit_transaction, give_up)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            never_sent = cause.code() == KafkaError._INCONSISTENT  # noqa: SLF001  deliveries failed
            if not cause.fatal() and not is_torn(cause) and (never_sent or cause.txn_requires_abort()):
                # Its EndTxn(commit) may be out, and the abort's answer will not tell: one with a cause ends the epoch.
                return self.abort(self._reports.error or cause, give_up)
            return Ended(f"the commit's outcome is unknown: {cause.str()}", error=cause)
        must(self._reports.are_good, "a commit must fail unless opening and manifest were acknowledged")
        return Committed()

    def abort(self, cause: KafkaError | None = None, give_up: GiveUp = never) -> Aborted | Ended:
        """Abort because of `cause`, None for our choice, and leave it to the next producer once `give_up` says so."""
        if not self._is_torn(cause):
            self._must_replace = self._must_replace or cause is not None or not self._is_all_acknowledged()
            try:
                if cause is not None:  # abort_transaction waits for delivery reports, and serves none
                    self._producer.purge(in_flight=False)
                    self._producer.flush(_PROBE_SECONDS)
                with self.step("the abort of a transaction"):
                    self._end(self._producer.abort_transaction, give_up)
                self._producer.poll(0)  # what is still to be reported
                self._must_replace = self._must_replace or bool(self._reports.awaited)
            except KafkaException as error:
                return Ended(f"the abort failed: {error.args[0].str()}", cause)
        if self._is_torn(cause):
            return self._torn(cause)
        if self._reports.refusal is not None:
            return self._reports.refusal
        if cause is None:
            return Aborted(None, record_at_fault=False)
        return Aborted(cause, record_at_fault=_may_be_about_records(cause))

    def _torn(self, cause: KafkaError | None) -> Ended:
        error = cause or self._reports.error
        # The coordinator does not know the id, and has added no partition: none of the records can have arrived, nor
        # did the protocol's own, which is the first.
        if error is not None and error.code() == KafkaError.INVALID_PRODUCER_ID_MAPPING and self._reports.offset < 0:
            why = "was idle for longer than the brokers' transactional.id.expiration.ms, and they have forgotten it"
            return Ended(f"transactional.id {self._transactional_id!r} {why}", cause, is_expiry=True)
        return Ended("a broker says that the open transaction is not open; what became of it is unknown", cause)

    def _is_all_acknowledged(self) -> bool:
        """Tell whether all records of the open transaction are in Kafka, and no abort would purge one."""
        if monotonic() - self._began_at >= self._record_timeout:
            return False  # one may have timed out, unreported
        with suppress(KafkaException):  # a broken producer: the probe says so
            self._producer.poll(0)
        return not len(self._producer) and self._reports.error is None and not self._has_transaction_failed()

    def _is_torn(self, cause: KafkaError | None) -> bool:
        return self._reports.is_torn or (cause is not None and is_torn(cause))

    def _end(self, call: Callable[[float], None], give_up: GiveUp) -> None:
        """Commit or abort, and see whether EndTxn may have been sent twice."""
        began = monotonic()
        try:
            while True:
                try:
                    return call(self._timeout)
                except KafkaException as error:
                    # What the client refused at once, without a connection, is not under way, and can be called again.
                    is_refused = error.args[0].retriable() and error.args[0].code() != KafkaError._TIMED_OUT  # noqa: SLF001
                    if not is_refused or monotonic() - began >= self._timeout or give_up():
                        raise
                    with suppress(KafkaException):  # a broken producer says so once more above
                        self._producer.poll(_REFUSED_POLL_SECONDS)
        finally:
            if monotonic() - began >= self._earliest_repeat:
                self._must_replace = True


def _unnoted(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def _milliseconds(settings: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(settings.get(name, default))
    except (TypeError, ValueError):
        raise InvalidConfig(f"Kafka settings: {name} is {settings[name]!r}, expected milliseconds") from None


def _record_timeout(settings: Mapping[str, Any]) -> float:
    """Return the age in seconds at which the client gives up a record."""
    longest = _milliseconds(settings, "transaction.timeout.ms", _DEFAULT_TRANSACTION_TIMEOUT_MS)
    names = ("delivery.timeout.ms", "message.timeout.ms")
    timeouts = [_milliseconds(settings, name, longest) for name in names if name in settings]
    return min([timeout for timeout in timeouts if timeout > 0] or [longest]) / 1000  # 0: never


def _may_be_about_records(error: KafkaError) -> bool:
    # A time-out may be that of one partition, a clock that is wrong that of one topic's broker or settings;
    # `_INCONSISTENT` says that some deliveries failed, and not why.
    about_messages = (KafkaError._MSG_TIMED_OUT, KafkaError._INCONSISTENT, KafkaError.INVALID_TIMESTAMP)  # noqa: SLF001
    return error.code() in about_messages or kind_of(error) in (
        ErrorKind.POISON,
        ErrorKind.UNAUTHORIZED,
        ErrorKind.UNKNOWN_TOPIC,
    )


class TransactionsRefused(OutboxError):
    """A transactional.id that we may not use."""


def check_transactional_id(config: KafkaConfig, transactional_id: str, *, timeout_seconds: float) -> None:
    """Check the rights on a transactional.id without fencing its user.

    A coordinator checks rights first, the transaction's time-out next, and gives an epoch only then. So ask with a
    time-out of 24 days, which no broker accepts (`transaction.max.timeout.ms`, 15 minutes by default). Raises
    TransactionsRefused, or KafkaUnavailable without an answer.
    """
    settings = {**config, "transactional.id": transactional_id, "transaction.timeout.ms": _NO_TRANSACTION_LASTS_MS}
    producer = make_producer(settings)
    try:
        producer.init_transactions(timeout_seconds)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if cause.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return
        if cause.retriable():
            raise KafkaUnavailable(f"no answer about transactional.id {transactional_id!r}: {cause.str()}") from None
        raise TransactionsRefused(explained(cause, config)) from None
    finally:
        discard(producer)
