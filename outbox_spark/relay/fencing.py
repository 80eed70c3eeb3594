"""The change of leaders: every publisher of the outbox is fenced, and the rows that it published are deleted.

A relay has one transactional.id for each shard. Each transaction holds a manifest, as a harvester's does
(`outbox_core.kafka.manifest`), on the shard's own partition of the relay's topic. The next leader, relay or harvester,
does the same for each transactional.id there ever was:

1. fence it, by `init_transactions()`: its last transaction is committed or aborted now;
2. read its last manifest, and the opening of a torn transaction behind it, up to a barrier;
3. delete the listed rows, by (id, create_time), and those of a torn transaction that are in Kafka.

Kafka has acknowledged the claim that won the election before step 1. A shard's task looks for a higher claim after it
has fenced its own transactional.id (`shard_task.py`), up to a message that it writes then itself. So a task of a
deposed relay either fenced before our step 1, and is fenced by it, or sees our claim.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from outbox_core.election.lease import now
from outbox_core.errors import KafkaUnavailable, MarkedRowsFound
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.topics import ensure_tracking_topic, partition_count
from outbox_core.kafka.tracking import Ledger, ManifestNotRead
from outbox_core.kafka.transactions import Ended, GiveUp
from outbox_core.stores.interface import ids_and_times
from outbox_core.stores.postgres.store import PostgresStore

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_AT_ONCE = 8
_SECONDS_EACH = 60.0
_FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)  # noqa: SLF001


def ensure_shards(identity: TransactionalIdentity, shards: int) -> None:
    """Make the topic of the manifests, or give it more partitions. Raises KafkaUnavailable, TrackingTopicError."""
    # A topic of one partition is a harvester's, which must have no more: here there may have been more shards before.
    ensure_tracking_topic(identity.kafka, identity.relay_topic, width=max(2, shards))


def fence_and_purge(identity: TransactionalIdentity, store: PostgresStore, give_up: GiveUp) -> int:
    """Fence every publisher of this outbox, and delete the rows that it published (rule 7); return their number."""
    shards = identity.relay_shards()
    server, count = store.server_id(), 0
    if partition_count(identity.kafka, identity.tracking_topic):
        # A harvester that is deposed without knowing must see a trace of us.
        count += _settle_and_leave_trace(identity, store, server, give_up)
    ledgers = _fence_all(shards, give_up)
    for shard, ledger in zip(shards, ledgers, strict=True):
        # Of another server's rows, or of a torn transaction, no later term must read again.
        if shard.is_of_other_server(ledger, server) or ledger.opening is not None:
            count += _settle_and_leave_trace(shard, store, server, give_up)
        else:
            count += delete_published(shard, ledger, store, give_up)
    if count:
        _log.info("purged %d rows that the last term had published", count)
    return count


def _fence_all(shards: list[TransactionalIdentity], give_up: GiveUp) -> list[Ledger]:
    """Fence some at a time; the first failure ends all, and is raised."""
    failures: list[BaseException] = []

    def fence(shard: TransactionalIdentity) -> Ledger:
        try:
            return _fence(shard, _soon(lambda: bool(failures) or give_up()))
        except BaseException as error:
            failures.append(error)
            raise

    with ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, len(shards))), thread_name_prefix="outbox-fence") as threads:
        fenced_shards = [threads.submit(fence, shard) for shard in shards]
    if failures:
        raise failures[0]
    return [shard.result() for shard in fenced_shards]


def _soon(give_up: GiveUp) -> GiveUp:
    """Limit the time for one transactional.id: there may be a thousand."""
    late_at = now() + _SECONDS_EACH
    return lambda: give_up() or now() > late_at


def _fence(identity: TransactionalIdentity, give_up: GiveUp) -> Ledger:
    with fenced(identity, give_up) as producer:
        return ledger_after_fence(identity, producer, give_up)


def _settle_and_leave_trace(identity: TransactionalIdentity, store: PostgresStore, server: str, give_up: GiveUp) -> int:
    """Fence, delete the published rows, and write a manifest of no rows; return how many were deleted."""
    with fenced(identity, _soon(give_up)) as producer:
        ledger = ledger_after_fence(identity, producer, _soon(give_up))
        identity.is_of_other_server(ledger, server)  # raises
        count = delete_published(identity, ledger, store, give_up)  # topics may take long to read
        left = identity.adopt(producer, server, ledger, _soon(give_up))
        unless_ended(left, f"tracking topic {identity.tracking_topic}")
    return count


def delete_published(identity: TransactionalIdentity, ledger: Ledger, store: PostgresStore, give_up: GiveUp) -> int:
    """Delete the rows that a ledger's transactions published; return how many. Raises KafkaUnavailable."""
    manifest, opening = ledger.manifest, ledger.opening
    count = store.delete_published(manifest.ids, manifest.create_times) if manifest is not None else 0
    if opening is not None:
        try:
            for rows in identity.read_torn(opening, give_up, store.find):
                count += store.delete_published(*ids_and_times(rows))
        except ManifestNotRead as error:
            raise KafkaUnavailable(str(error)) from None
    return count


def refuse_marked_rows(identity: TransactionalIdentity, store: PostgresStore) -> None:
    """Raise MarkedRowsFound for rows that an at-least-once harvester has left marked, unless they are accepted."""
    marked = store.marks.count()
    if not marked.number:
        return
    what = f"{marked.number} rows (ids {marked.first} to {marked.last}) carry the mark of an at-least-once harvester"
    if not identity.accept_marked:
        raise MarkedRowsFound(
            f"{what} that did not stop in good order: those that it had sent would be repeated. Let an at-least-once "
            "harvester drain them, or accept the possible repeats with acceptMarked"
        )
    _log.warning("%s; those that it had sent are repeated", what)


@contextmanager
def fenced(identity: TransactionalIdentity, give_up: GiveUp) -> Iterator[RecordProducer]:
    """Yield a producer of this transactional.id that has fenced the last one (rule 2). Raises KafkaUnavailable."""
    producer = identity.new_producer()
    try:
        unless_ended(producer.init(give_up), f"transactional.id {identity.transactional_id}")
        yield producer
    finally:
        producer.discard()


def ledger_after_fence(
    identity: TransactionalIdentity, producer: RecordProducer, give_up: GiveUp, *, stays_open: bool = False
) -> Ledger:
    """Read the last manifest and opening; with `stays_open` the transaction of the reading stays open."""
    found = (identity.open if stays_open else identity.ledger)(producer, give_up)
    ledger = unless_ended(found, f"tracking topic {identity.tracking_topic}")
    identity.refuse_foreign(ledger)
    return ledger


class Fenced(KafkaUnavailable):
    """The transactional.id belongs to another process now, or the transaction was open for too long."""


def unless_ended(outcome: T | Ended, what: str = "") -> T:
    """Return an outcome. Raises KafkaUnavailable if the producer is of no more use, Fenced if it was fenced."""
    if isinstance(outcome, Ended):
        is_fenced = any(error is not None and error.code() in _FENCED for error in (outcome.error, outcome.cause))
        reason = f"{what}: {outcome.reason}" if what else outcome.reason
        if is_fenced:
            raise Fenced(f"{reason} (by another attempt, or as a transaction was open for longer than its time-out)")
        raise KafkaUnavailable(reason)
    return outcome
