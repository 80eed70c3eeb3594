"""The tracking topic: each transaction leaves its manifest there, and a new term finds the last one.

The topic is compacted, so that the last manifest never expires. Each partition belongs to a single transactional.id:
another producer's open transaction would hide the manifest behind the last stable offset. By key:

    <transactional.id>           a manifest, the last record of its transaction
    <transactional.id>:begin     an opening, the first record of its transaction
    <transactional.id>:barrier   a barrier, aborted: see below

**Recovery writes the end of the topic instead of asking for it.** A broker that was cut off still answers questions
about partitions that have moved, and would hide the last manifest. So recovery produces a barrier in a transaction of
its own, takes its offset from the acknowledgement (which only the true leader can give), and reads up to there as a
read_committed client. While that transaction is open the last stable offset stands at the barrier: a reader that
reaches it has seen every earlier commit. Then recovery aborts the transaction.

All this comes after `init_transactions()`: before it the predecessor's transaction may still be open, and its manifest
unseen. The barrier's transaction is the first of its epoch: no late EndTxn ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import Any

from outbox_core.errors import KafkaUnavailable, TrackingTopicError, must
from outbox_core.kafka.clients import KafkaError, KafkaException, Message, TopicPartition, end_client, make_consumer
from outbox_core.kafka.errors import grant, why_no_manifest
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.reader import PartitionReader, partition_ends, reader_settings
from outbox_core.kafka.transactions import Ended, TransactionalProducer

_FIRST_STEP = 64
_STEP_FACTOR = 16
_BARRIER_SECONDS = 10.0
_FIRST_RECORDS_SECONDS = 10.0
_BARRIER = b'{"v":1,"barrier":true}'


class ManifestNotRead(Exception):
    """A tracking topic whose end was not reached: the broker is away, or another transaction is open there."""


class ForeignLedger(TrackingTopicError):
    """Another outbox's records in the tracking topic, on whose word no row may be deleted."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The last transactions, as the tracking topic tells them."""

    manifest: Manifest | None = None
    opening: Opening | None = None  # of a later, torn batch
    foreign: str = ""  # description of a stranger's record, '' for none
    offset: int = -1  # of the manifest, -1 for none


def opening_key(transactional_id: str) -> str:
    """Return the key of the openings of a transactional.id."""
    return f"{transactional_id}:begin"


def write_barrier(
    producer: TransactionalProducer, topic: str, partition: int, transactional_id: str, give_up: Callable[[], bool]
) -> int | Ended:
    """Open a transaction with a barrier on the tracking topic, and return its offset."""
    ended = producer.begin() or producer.send_manifest(topic, _BARRIER, partition, key=f"{transactional_id}:barrier")
    if ended is not None:
        return ended
    if not producer.all_arrive(_BARRIER_SECONDS, give_up) or producer.manifest_offset < 0:
        cause = producer.failure
        return Ended(why_no_manifest(topic, cause), cause)
    return producer.manifest_offset


def read_ledger(
    kafka: Mapping[str, Any],
    group: str,
    topic: str,
    partition: int,
    transactional_id: str,
    *,
    end: int,
    give_up: Callable[[], bool],
) -> Ledger:
    """Read the last committed manifest of a transactional.id before a barrier at offset `end`.

    Raises ForeignLedger if it cannot be decoded, TrackingTopicError if we may not read the topic, and ManifestNotRead
    if the barrier was not reached.
    """
    try:
        with closing(LedgerReader(kafka, group, topic, partition, give_up)) as reader:
            return reader.ledger(transactional_id, end)
    except KafkaException as error:
        raise ManifestNotRead(error.args[0].str()) from None
    except KafkaUnavailable as error:
        raise ManifestNotRead(str(error)) from None


def holds_only_ours(kafka: Mapping[str, Any], group: str, topic: str, transactional_id: str) -> bool:
    """Tell whether each partition of a topic is empty, or begins with a record of a transactional.id or its shards.

    Raises KafkaUnavailable if that cannot be found out.
    """
    settings = {**reader_settings(kafka, group), "isolation.level": "read_uncommitted"}
    give_up_at = monotonic() + _FIRST_RECORDS_SECONDS

    def check_patience() -> None:
        if monotonic() >= give_up_at:
            raise KafkaUnavailable(f"topic {topic!r} was not read in time")

    def fail(error: KafkaError, _: str) -> None:
        if error.fatal() or not error.retriable():
            raise KafkaException(error)

    try:
        ends = partition_ends(settings, [topic], timeout_seconds=_FIRST_RECORDS_SECONDS)
        with closing(make_consumer(settings)) as consumer:
            for place, end in ends.items():
                start = TopicPartition(*place, 0)
                reader = PartitionReader(consumer, [start], {place: end}, on_error=fail, give_up=check_patience)
                for [first] in reader:
                    if not _is_of(transactional_id, first.key()):
                        return False
                    break
    except KafkaException as error:
        raise KafkaUnavailable(f"topic {topic!r} cannot be read: {error.args[0].str()}") from None
    return True


def _is_of(transactional_id: str, key: bytes | None) -> bool:
    """Tell whether a record's key is that of a transactional.id, of what belongs to it, or of one of its shards."""
    name, wanted = key or b"", transactional_id.encode()
    return name == wanted or name.startswith(wanted + b":")


class LedgerReader:
    """A reader of one partition from the end backwards, in growing steps.

    Offsets have holes, so the last manifest's offset cannot be computed: a stretch without one makes the next one
    longer.
    """

    def __init__(
        self, kafka: Mapping[str, Any], group: str, topic: str, partition: int, give_up: Callable[[], bool]
    ) -> None:
        self._kafka = kafka
        self._group = group
        self._place = TopicPartition(topic, partition)
        self._give_up = give_up
        self._consumer = make_consumer(reader_settings(kafka, group))

    def close(self) -> None:
        """Close the consumer."""
        end_client(self._consumer.close)

    def ledger(self, transactional_id: str, end: int) -> Ledger:
        """Return the last state before `end`."""
        step = _FIRST_STEP
        while True:
            start = max(0, end - step)
            last, torn, foreign = self._between(start, end, transactional_id)
            if last is not None or start == 0:
                break
            step *= _STEP_FACTOR
        at = -1 if last is None else last.offset() or 0
        must(at < end, "the last manifest must lie before the barrier at offset %d; it was read at %d", end, at)
        try:
            return Ledger(
                Manifest.decode(last.value() or b"") if last is not None else None,
                Opening.decode(torn.value() or b"", torn.timestamp()[1]) if torn is not None else None,
                "" if foreign is None else f"a record with the key {foreign.key()!r} at offset {foreign.offset()}",
                at,
            )
        except TrackingTopicError as error:
            raise ForeignLedger(f"tracking topic {self._place.topic!r}: {error}") from None

    def _between(
        self, start: int, end: int, transactional_id: str
    ) -> tuple[Message | None, Message | None, Message | None]:
        """Return the last manifest from `start` on, an opening after it, and a stranger's record after it."""
        topic, partition = self._place.topic, self._place.partition
        wanted, opening = transactional_id.encode(), opening_key(transactional_id).encode()
        last: Message | None = None
        torn: Message | None = None
        foreign: Message | None = None
        starts = [TopicPartition(topic, partition, start)]
        reader = PartitionReader(
            self._consumer, starts, {(topic, partition): end}, on_error=self._on_error, give_up=self._check_patience
        )
        for [message] in reader:
            key = message.key()
            if key == wanted:
                last, torn, foreign = message, None, None
            elif key == opening:
                torn = message
            elif not _is_of(transactional_id, key):
                foreign = message
        return last, torn, foreign

    def _check_patience(self) -> None:
        if self._give_up():
            raise ManifestNotRead("the end of the tracking topic was not reached in time")

    def _on_error(self, error: KafkaError, topic: str) -> None:
        if error.code() in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED):
            is_group = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
            needed = grant("READ", self._kafka, f"group {self._group!r}" if is_group else "it")
            raise TrackingTopicError(f"cannot read tracking topic {topic!r}: {error.str()}; {needed}")
        if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001  confluent's public constant
            raise ManifestNotRead(error.str())
