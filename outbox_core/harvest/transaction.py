"""One transactional producer: for the harvester, for queues and for Spark, with all defences that transactions need.

librdkafka reports three kinds of trouble inside a transaction, and each means something else:

- the transaction must be aborted (`Aborted`): none of it will ever be seen, and the producer can go on;
- the producer is fenced or otherwise broken (`Ended`): another process has taken the transactional.id, or the
  coordinator gave the transaction up because it was open too long;
- the outcome is unknown (`Ended` too): a call timed out, or a broker says that the transaction is not open (it was
  *torn*: ended by something else). Only a new producer's `init_transactions()` settles it.

**EndTxn may arrive late.** librdkafka (2.16, no KIP-890 part 2) repeats an EndTxn whose connection was lost by itself,
on a new connection, in the same epoch, and then reports success. The first copy may still arrive, and would end a later
transaction of that epoch. So no transaction begins in an epoch in which an EndTxn may have been sent twice:

- a repeat is never sent earlier than 0.8 x min(retry.backoff.ms, retry.backoff.max.ms) after the first copy
  (`rd_kafka_broker_buf_retry`: 20% jitter, then the cap). Here retry.backoff.ms is 500 at least;
- each commit and abort is timed, from the last moment at which records were outstanding, as EndTxn is sent later;
- if that took long enough for a repeat, the next `begin` replaces the producer first: `init_transactions()` bumps the
  epoch, and brokers refuse what carries the old one.

This alone prevents losses and repeats (R13 of docs/explanation-exactly-once.md). That a torn transaction is recognised,
by its opening (R14), alone prevents losses, and not all repeats.

The same holds for offsets: a late copy of TxnOffsetCommit would replace those of a later transaction.

**So may Produce.** A record whose connection was lost waits to be sent again; an abort purges it, and librdkafka gives
its sequence number to the partition's next record (`rd_kafka_toppar_purge_queues`, "ADVBASE"). If the first copy has
reached the broker, or still does, that takes one of the two for a repeat of the other: the aborted one is seen, or the
next one is lost, and both are acknowledged. So an abort of records that are not all acknowledged replaces the producer,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from outbox_core.errors import InvalidConfig
from outbox_core.harvest.verdicts import Verdict, is_bystander, verdict_on
from outbox_core.kafka import KafkaError, KafkaException, Message, TopicPartition, discard, grant, make_producer

_INIT_ATTEMPT_SECONDS = 2.0
_QUEUE_FULL_POLL_SECONDS = 0.01
_RETRY_POLL_SECONDS = 0.01
_SLICE_SECONDS = 0.1
_PROBE_SECONDS = 0.1
_OFFSETS_REPEAT_SECONDS = 0.5  # after which librdkafka repeats TxnOffsetCommit: rd_kafka_txn_handle_TxnOffsetCommit
_LEAST_BACKOFF_MS = 500
_BACKOFF_MAX_MS = 1000  # librdkafka's default of retry.backoff.max.ms
_EARLIEST_REPEAT = 0.7  # of the backoff; librdkafka's jitter leaves 0.8 of it at least, the rest is our margin

_TORN = frozenset({KafkaError.INVALID_TXN_STATE, KafkaError.INVALID_PRODUCER_ID_MAPPING})

GiveUp = Callable[[], bool]
Headers = list[tuple[str, Any]]


def never() -> bool:
    """The answer of callers that do not give up."""
    return False


@dataclass(frozen=True, slots=True)
class Committed:
    """The transaction is in Kafka, whole."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The transaction is not in Kafka, and the producer can begin another.

    Attributes:
        error: what its first failed record, or else the transaction itself, failed of; None if it was our choice.
        record_at_fault: whether it may be about a record, or its destination, and not about the cluster.
    """

    error: KafkaError | None
    record_at_fault: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The producer is of no more use; what became of its transaction is settled by the next one.

    Attributes:
        reason: what happened, in words.
        cause: why the transaction had to be aborted, if it was that which broke the producer, or why the manifest was
            refused.
        error: what Kafka has said, where that is neither of these.
    """

    reason: str
    cause: KafkaError | None = None
    error: KafkaError | None = None


Outcome = Committed | Aborted | Ended


def is_torn(error: KafkaError) -> bool:
    """Whether a broker says that our open transaction is not open: it was ended by something else, unknown how."""
    return error.code() in _TORN


class _Reports:
    """What is known to have failed in one transaction. Knows no producer: as its callback it would keep it alive.

    Attributes:
        error: why the transaction has failed, as far as it is known.
        refusal: why a record of the protocol itself (a manifest) was not taken.
        offset: of the last record of the protocol that was taken.
        is_torn: whether a broker has said that the transaction is not open.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.error: KafkaError | None = None
        self.refusal: KafkaError | None = None
        self.offset = -1
        self.is_torn = False

    def note(self, error: KafkaError) -> None:
        self.is_torn = self.is_torn or is_torn(error)
        if self.error is None and not is_bystander(error):
            self.error = error

    def note_own(self, error: KafkaError | None, message: Message) -> None:
        """A record of the protocol itself was delivered or not."""
        if error is None:
            offset = message.offset()
            self.offset = -1 if offset is None else offset  # DUPLICATE_SEQUENCE_NUMBER tells none
            return
        self.note(error)
        if not is_bystander(error):
            self.refusal = error


class TransactionalProducer:
    """A Kafka producer with a fixed transactional.id. Used by one thread.

        init -> (begin -> produce, send_offsets -> [all_arrive] -> commit or abort)* -> discard

    Args:
        settings: librdkafka settings, `transactional.id` and `transaction.timeout.ms` among them.
            `retry.backoff.ms` is raised to 500.
        timeout_seconds: how long a commit or an abort may take.
    """

    def __init__(self, settings: Mapping[str, Any], *, timeout_seconds: float) -> None:
        backoff = max(_milliseconds(settings, "retry.backoff.ms", 0), _LEAST_BACKOFF_MS)
        longest = max(_milliseconds(settings, "retry.backoff.max.ms", _BACKOFF_MAX_MS), backoff)
        self._transactional_id = str(settings["transactional.id"])
        self._timeout = timeout_seconds
        self._earliest_repeat = _EARLIEST_REPEAT * backoff / 1000
        self._reports = _Reports()
        self._settings = {
            **settings,
            "retry.backoff.ms": backoff,
            "retry.backoff.max.ms": longest,
        }
        self._batch_bytes: int | None = None
        self._give_up: GiveUp = never
        self._must_replace = False
        self._producer: Any = self._make()

    @property
    def must_replace(self) -> bool:
        """Whether the next `begin` will replace the producer, to bump its epoch or to change its settings."""
        return self._must_replace

    @property
    def failure(self) -> KafkaError | None:
        """What the open transaction has failed of, as far as it is known."""
        return self._reports.error

    def _make(self) -> Any:
        # As a rule without delivery reports: they would cost more than all the rest, and the commit vouches for all.
        sized = {} if self._batch_bytes is None else {"batch.size": self._batch_bytes}
        return make_producer({**self._settings, **sized})

    def init(self, give_up: GiveUp = never) -> Ended | None:
        """Fence the last owner of the transactional.id and wait until its transaction is settled.

        Args:
            give_up: asked now and then, here and where `begin` does the same.

        Returns:
            None when that is done; `Ended` if it failed or was given up.
        """
        self._give_up = give_up
        why = ""
        while not give_up():
            try:
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
        if cause.code() != KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return cause.str()
        needed = grant("WRITE and DESCRIBE", self._settings)
        return f"transactional.id {self._transactional_id!r} may not be used: {cause.str()}; {needed}"

    def discard(self) -> None:
        """Let go of the producer: its threads and connections end. May be called again."""
        producer, self._producer = self._producer, None
        self._give_up = never
        if producer is not None:
            discard(producer)

    def limit_batches(self, max_bytes: int | None) -> None:
        """Set the largest batch the client builds, for topics with a small max.message.bytes.

        Takes effect at the next `begin`, which replaces the producer if this changes anything.

        Args:
            max_bytes: librdkafka's `batch.size`; None for what the settings say.
        """
        if max_bytes != self._batch_bytes:
            self._batch_bytes = max_bytes
            self._must_replace = True

    def begin(self) -> Ended | None:
        """Open a transaction, with a new producer if a late EndTxn could meet it.

        A new producer fences whoever has fenced the old one. A caller that decides by what it has read, and relies on
        being fenced when that is out of date, calls `replace` itself when `must_replace`, and reads again.
        """
        if self._must_replace:
            ended = self.replace()
            if ended is not None:
                return ended
        self._reports.clear()
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            return Ended(error.args[0].str())
        return None

    def replace(self, give_up: GiveUp | None = None) -> Ended | None:
        """Go on with a new producer of the same transactional.id, in a new epoch.

        Args:
            give_up: asked now and then; that of `init`, unless told.
        """
        give_up = give_up or self._give_up
        self.discard()
        self._producer = self._make()
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
        """Add a record to the open transaction.

        Args:
            topic: where to.
            value: None is a tombstone.
            key: or None.
            partition: -1 lets the partitioner decide.
            headers: pairs of name and value, None for none.
            give_up: asked while the client's queue is full.
            more: further arguments of `confluent_kafka.Producer.produce`.

        Returns:
            False if `give_up` said so.

        Raises:
            KafkaException: if the client refuses the record, or the transaction has failed (code `_STATE`).
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
        """Offset of the last record sent by `send_manifest` that is acknowledged, -1 if there is none yet."""
        return self._reports.offset

    def send_manifest(self, topic: str, value: bytes, partition: int = 0, *, key: str | None = None) -> Ended | None:
        """Add a record of the protocol itself: if it is refused the transaction ends in `Ended`.

        Args:
            topic: the tracking topic.
            value: the manifest.
            partition: the one that belongs to this transactional.id.
            key: the transactional.id, unless told.
        """
        try:
            note = self._reports.note_own
            self.produce(topic, value, key or self._transactional_id, partition, on_delivery=note)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() == KafkaError._STATE:  # noqa: SLF001  the commit will tell
                return None
            return Ended(f"the manifest was refused: {cause.str()}", cause)
        return None

    def send_offsets(self, positions: Sequence[TopicPartition], group_metadata: Any, timeout_seconds: float) -> None:
        """Add a consumer's positions to the transaction.

        Waits for the records before it: the coordinator refuses AddOffsetsToTxn while the last transaction is still
        being completed, and librdkafka repeats it only after retry.backoff.ms; AddPartitionsToTxn is repeated at once.

        Raises:
            KafkaException: if it was not done; the transaction has to be aborted.
        """
        if not self.all_arrive(timeout_seconds):
            raise KafkaException(self.failure or KafkaError(KafkaError._TIMED_OUT, "records were not acknowledged"))  # noqa: SLF001
        began = monotonic()
        try:
            self._producer.send_offsets_to_transaction(list(positions), group_metadata, timeout_seconds)
        finally:
            if monotonic() - began >= min(self._earliest_repeat, _OFFSETS_REPEAT_SECONDS):
                self._must_replace = True

    def all_arrive(self, timeout_seconds: float, give_up: GiveUp = never) -> bool:
        """Wait until all that was produced is acknowledged.

        Returns:
            False if it was not in time, was given up, or cannot be any more, as the transaction has failed.
        """
        give_up_at = monotonic() + timeout_seconds
        while True:
            left = give_up_at - monotonic()
            with suppress(KafkaException):  # a broken producer: the probe says so
                if not self._producer.flush(max(0.0, min(_PROBE_SECONDS, left))):
                    # What failed is not outstanding any more, either.
                    return not self._has_transaction_failed() and self._reports.error is None
            if self._has_transaction_failed() or left <= 0 or give_up():
                return False

    def _has_transaction_failed(self) -> bool:
        """Ask the client for the state of the open transaction.

        `begin_transaction` changes nothing while one is open. It says why that has failed, if it has, and else that it
        is open (`_STATE`).
        """
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
        """Commit the transaction, and abort it if it must be.

        Args:
            give_up: asked while the answer is out; the outcome is then left to the next producer.
        """
        try:
            self._end(self._producer.commit_transaction, give_up)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            never_sent = cause.code() == KafkaError._INCONSISTENT  # noqa: SLF001  deliveries failed
            if not cause.fatal() and not is_torn(cause) and (never_sent or cause.txn_requires_abort()):
                # Its EndTxn(commit) may be out, and the abort's answer will not tell.
                self._must_replace = self._must_replace or not never_sent
                return self.abort(self._reports.error or cause, give_up)
            return Ended(f"the commit's outcome is unknown: {cause.str()}", error=cause)
        return Committed()

    def abort(self, cause: KafkaError | None = None, give_up: GiveUp = never) -> Aborted | Ended:
        """Abort the open transaction.

        Args:
            cause: what it has failed of; None if it is our choice.
            give_up: asked while the answer is out; the abort is then left to the next producer.
        """
        if not self._is_torn(cause):
            self._must_replace = self._must_replace or cause is not None or not self._is_all_acknowledged()
            try:
                self._end(self._producer.abort_transaction, give_up)
                self._producer.poll(0)  # what is still to be reported
            except KafkaException as error:
                return Ended(error.args[0].str(), cause)
        if self._is_torn(cause):
            return Ended("a broker says that the open transaction is not open; what became of it is unknown", cause)
        refusal = self._reports.refusal
        if refusal is not None:
            return Ended(f"the manifest was refused: {refusal.str()}", refusal)
        if cause is None:
            return Aborted(None, record_at_fault=False)
        return Aborted(cause, record_at_fault=_may_be_about_records(cause))

    def _is_all_acknowledged(self) -> bool:
        """Whether all records of the open transaction are in Kafka: none was purged, or is going to be."""
        with suppress(KafkaException):  # a broken producer: the probe says so
            self._producer.poll(0)
        return not len(self._producer) and self._reports.error is None and not self._has_transaction_failed()

    def _is_torn(self, cause: KafkaError | None) -> bool:
        return self._reports.is_torn or (cause is not None and is_torn(cause))

    def _end(self, call: Callable[[float], None], give_up: GiveUp) -> None:
        """Commit or abort, in slices that can be resumed, and see whether EndTxn may have been sent twice.

        EndTxn is sent once nothing is outstanding, so it is timed from then on. The slices matter: one long call could
        not tell when that was.
        """
        sent_after = monotonic()
        give_up_at = sent_after + self._timeout
        has_arrived = False
        try:
            while True:
                with suppress(KafkaException):  # a broken producer says so once more below
                    self._producer.poll(0)  # reports that were not served yet count as outstanding
                # Once is enough: what is outstanding after that is an error event, and no record.
                has_arrived = has_arrived or not len(self._producer)
                if not has_arrived:
                    sent_after = monotonic()
                try:
                    return call(max(0.0, min(_SLICE_SECONDS, give_up_at - monotonic())))
                except KafkaException as error:
                    if not error.args[0].retriable() or monotonic() >= give_up_at or give_up():
                        raise
                    with suppress(KafkaException):
                        self._producer.poll(_RETRY_POLL_SECONDS)  # it may have been refused at once
        finally:
            if monotonic() - sent_after >= self._earliest_repeat:
                self._must_replace = True


def _milliseconds(settings: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(settings.get(name, default))
    except (TypeError, ValueError):
        raise InvalidConfig(f"Kafka settings: {name} is {settings[name]!r}, expected milliseconds") from None


def _may_be_about_records(error: KafkaError) -> bool:
    """A time-out may be that of one partition; `_INCONSISTENT` says that some deliveries failed, and not why."""
    about_messages = (KafkaError._MSG_TIMED_OUT, KafkaError._INCONSISTENT)  # noqa: SLF001
    return error.code() in about_messages or verdict_on(error) in (Verdict.RECORD, Verdict.FORBIDDEN, Verdict.AWAY)
