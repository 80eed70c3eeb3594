"""The tracking topic: where each transaction leaves its manifest, and where a new term finds the last one.

The topic is compacted, so that the last manifest never expires. Each partition belongs to a single transactional.id:
another producer's open transaction would hide the manifest behind the last stable offset. A harvester's topic has one
partition; a relay's (`outbox_spark`) has one for each of its shards. By key:

    <transactional.id>           a manifest, the last record of its transaction
    <transactional.id>:begin     an opening, the first record of its transaction
    <transactional.id>:barrier   a barrier, aborted: see below

**The end of the topic is written, not asked for.** A broker that has been cut off from its cluster goes on answering
questions about partitions that have moved, and would hide the last manifest. So recovery produces a barrier in a
transaction of its own, takes its offset from the acknowledgement (which only the true leader can give), and reads, as a
read_committed client, up to there. While that transaction is open the last stable offset stands at the barrier: a
reader that has reached it has seen all that was ever committed before. Then the transaction is aborted.

It may only be done after `init_transactions()`. Until then the predecessor's transaction may still be open, and
whatever is read is not the last word. The barrier's transaction is the first of its epoch: no late EndTxn can end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outbox_core.errors import TrackingTopicError
from outbox_core.harvest.manifest import Manifest, Opening
from outbox_core.harvest.transaction import Ended, TransactionalProducer
from outbox_core.kafka import KafkaError, KafkaException, Message, TopicPartition, grant, make_consumer

_FIRST_STEP = 64
_STEP_FACTOR = 16
_POLL_SECONDS = 0.1
_BARRIER_SECONDS = 10.0
_BARRIER = b'{"v":1,"barrier":true}'


class ManifestNotRead(Exception):
    """The end of the tracking topic was not reached: the broker is away, or another transaction is open there."""


class ForeignLedger(TrackingTopicError):
    """What the tracking topic holds is not this outbox's; nothing may be deleted on its word."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the tracking topic says of the last transactions.

    Attributes:
        manifest: the last committed one, None if there never was one.
        opening: of a later batch without a manifest, which was torn; None if there is none.
        foreign: what else is there, in words; '' if there is nothing else.
        offset: of the manifest, -1 if there is none.
    """

    manifest: Manifest | None = None
    opening: Opening | None = None
    foreign: str = ""
    offset: int = -1


def opening_key(transactional_id: str) -> str:
    """Key of the openings of a transactional.id."""
    return f"{transactional_id}:begin"


def write_barrier(
    producer: TransactionalProducer, topic: str, partition: int, transactional_id: str, give_up: Callable[[], bool]
) -> int | Ended:
    """Open a transaction with a barrier on the tracking topic; return its offset."""
    ended = producer.begin() or producer.send_manifest(topic, _BARRIER, partition, key=f"{transactional_id}:barrier")
    if ended is not None:
        return ended
    if not producer.all_arrive(_BARRIER_SECONDS, give_up) or producer.manifest_offset < 0:
        cause = producer.failure
        return Ended(f"the tracking topic takes no record: {'no answer' if cause is None else cause.str()}", cause)
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
    """Read what was committed last, before a barrier.

    Args:
        kafka: librdkafka settings of the cluster.
        group: a group.id that we may use; it is not joined, and nothing is committed.
        topic: the tracking topic.
        partition: the one that belongs to this transactional.id.
        transactional_id: whose manifests they must be.
        end: offset of the barrier.
        give_up: asked now and then; when true, `ManifestNotRead` is raised.

    Raises:
        ForeignLedger: if the last manifest or opening is none.
        TrackingTopicError: if the topic may not be read.
        ManifestNotRead: if the barrier was not reached.
    """
    reader = _Reader(kafka, group, topic, partition, give_up)
    try:
        return reader.ledger(transactional_id, end)
    except KafkaException as error:
        raise ManifestNotRead(error.args[0].str()) from None
    finally:
        reader.close()


class _Reader:
    """Reads one partition of the topic from the end backwards, in growing steps.

    Offsets have holes (transaction markers, aborted and compacted records), so a record's offset cannot be computed
    from the end: a stretch before the end is read, and a longer one if there was no manifest in it.
    """

    def __init__(
        self, kafka: Mapping[str, Any], group: str, topic: str, partition: int, give_up: Callable[[], bool]
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._give_up = give_up
        self._group = group
        self._kafka = kafka
        self._consumer = make_consumer(reader_settings(kafka, group))

    def close(self) -> None:
        self._consumer.close()

    def ledger(self, transactional_id: str, end: int) -> Ledger:
        wanted, opening = transactional_id.encode(), opening_key(transactional_id).encode()
        step = _FIRST_STEP
        while True:
            start = max(0, end - step)
            last, torn, foreign = self._between(start, end, wanted, opening)
            if last is not None or start == 0:
                return self._decoded(last, torn, foreign)
            step *= _STEP_FACTOR

    def _decoded(self, last: Message | None, torn: Message | None, foreign: Message | None) -> Ledger:
        try:
            return Ledger(
                Manifest.decode(last.value() or b"") if last is not None else None,
                Opening.decode(torn.value() or b"", torn.timestamp()[1]) if torn is not None else None,
                "" if foreign is None else f"a record with the key {foreign.key()!r} at offset {foreign.offset()}",
                -1 if last is None else last.offset() or 0,
            )
        except TrackingTopicError as error:
            raise ForeignLedger(f"tracking topic {self._topic!r}: {error}") from None

    def _between(
        self, start: int, end: int, wanted: bytes, opening: bytes
    ) -> tuple[Message | None, Message | None, Message | None]:
        """The last manifest from `start` on, an opening after it, and a record of somebody else after it."""
        last: Message | None = None
        torn: Message | None = None
        foreign: Message | None = None
        for message in self._committed(start, end):
            key = message.key()
            if key == wanted:
                last, torn, foreign = message, None, None
            elif key == opening:
                torn = message
            elif key is None or not key.startswith(wanted + b":"):
                foreign = message
        return last, torn, foreign

    def _committed(self, start: int, end: int) -> Iterator[Message]:
        """The committed records from `start` on, until all before `end` has been seen."""
        if start >= end:
            return
        self._consumer.assign([TopicPartition(self._topic, self._partition, start)])
        while not self._give_up():
            message = self._consumer.poll(_POLL_SECONDS)
            if message is None:
                continue
            error = message.error()
            if error is None:
                yield message
            elif error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                needed = grant("READ", self._kafka, f"group {self._group!r}")
                raise TrackingTopicError(f"cannot read tracking topic {self._topic!r}: {error.str()}; {needed}")
            elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                needed = grant("READ", self._kafka)
                raise TrackingTopicError(f"cannot read tracking topic {self._topic!r}: {error.str()}; {needed}")
            elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001  confluent's public constant
                if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
                    raise ManifestNotRead(error.str())
            elif (message.offset() or 0) >= end:
                return
        raise ManifestNotRead("the end of the tracking topic was not reached in time")


def reader_settings(kafka: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Librdkafka settings of a read_committed consumer that is assigned partitions and reads them to their end."""
    return {
        **{name: value for name, value in kafka.items() if name != "group.instance.id"},
        "group.id": group,  # required by the client; no group is joined, nothing is committed
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        # Where the first records are gone (DeleteRecords), what is left is all there is.
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 10,  # at the end of the topic nothing more comes: do not wait for it
    }
