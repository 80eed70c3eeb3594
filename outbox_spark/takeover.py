"""What a relay does when a term begins, and when it ends: leave no doubt about what is in Kafka.

A relay publishes with one transactional.id for each shard. Each transaction holds a manifest, as a harvester's does
(`outbox_core.harvest.manifest`), on the shard's own partition of the relay's topic. So whoever takes over, relay or
harvester, does the same for each transactional.id there ever was:

1. fence it, by `init_transactions()`: its last transaction is committed or aborted now;
2. read its last manifest, and the opening of a torn transaction behind it, up to a barrier;
3. delete the rows it lists, by (id, create_time), and those of a torn one that Kafka has.

This comes after the claim that won the election, which Kafka has acknowledged by then. A shard's task looks for a
higher claim after it has fenced its own transactional.id (`claims.py`, `shard_writer.py`), up to a message that it
writes at that time itself. So a task of a deposed relay either fenced before our step 1, and is fenced by it, or sees
our claim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from outbox_core.errors import KafkaUnavailable, MarkedRowsFound
from outbox_core.harvest.record_producer import RecordProducer
from outbox_core.harvest.recovery import Transactions
from outbox_core.harvest.tracking import Ledger, ManifestNotRead
from outbox_core.harvest.transaction import Ended
from outbox_core.kafka import topic_exists
from outbox_spark.batch_store import BatchStore

_log = logging.getLogger(__name__)

_MOST_AT_ONCE = 8


def settle(transactions: Transactions, store: BatchStore, over: Callable[[], bool]) -> int:
    """Fence whoever published this outbox, and delete what they published; return how many rows that were.

    Args:
        transactions: of the outbox.
        store: where the rows are.
        over: asked now and then; when true, it is given up.

    Raises:
        KafkaUnavailable: if Kafka does not answer in time, or it was given up.
        TrackingTopicError: if a tracking topic holds something else.
        StoreUnavailable: if the database is away.
    """
    owners = transactions.relay_shards()
    count = 0
    if topic_exists(transactions.kafka, transactions.tracking_topic):
        count += _settle_harvester(transactions, store, over)
    with ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, len(owners))), thread_name_prefix="outbox-settle") as threads:
        ledgers = list(threads.map(lambda owner: _ledger(owner, over), owners))
    server = store.server_id()
    for owner, ledger in zip(owners, ledgers, strict=True):
        has_moved = owner.is_of_other_server(ledger, server)  # raises
        count += _settle(owner, ledger, store, over)
        if has_moved:
            _adopt(owner, server, over)
    if count:
        _log.info("purged %d rows that the last term had published", count)
    return count


def _settle_harvester(transactions: Transactions, store: BatchStore, over: Callable[[], bool]) -> int:
    """Settle a harvester's last transaction, and leave a trace: if it is deposed without knowing, it has to see it."""
    producer = fence(transactions, over)
    try:
        ledger, server = ledger_after_fence(transactions, producer, over), store.server_id()
        transactions.is_of_other_server(ledger, server)  # raises
        count = _settle(transactions, ledger, store, over)
        _leave_trace(transactions, producer, server, ledger, over)
        return count
    finally:
        producer.discard()


def _adopt(owner: Transactions, server: str, over: Callable[[], bool]) -> None:
    """Have a shard name this server from now on: it was moved here, and what another one had published is settled."""
    producer = fence(owner, over)
    try:
        _leave_trace(owner, producer, server, ledger_after_fence(owner, producer, over), over)
    finally:
        producer.discard()


def _leave_trace(
    owner: Transactions, producer: RecordProducer, server: str, settled: Ledger, over: Callable[[], bool]
) -> None:
    adopted = owner.adopt(producer, server, settled, over)
    if isinstance(adopted, Ended):
        raise KafkaUnavailable(f"tracking topic {owner.tracking_topic}: {adopted.reason}")


def _settle(owner: Transactions, ledger: Ledger, store: BatchStore, over: Callable[[], bool]) -> int:
    """Delete what one transactional.id has published; return how many rows that were."""
    manifest, opening = ledger.manifest, ledger.opening
    count = store.settle(manifest.ids, manifest.create_times) if manifest is not None else 0
    if opening is not None:
        try:
            for rows in owner.read_torn(opening, over, store.find):
                count += store.settle([row[0] for row in rows], [row[7] for row in rows])
        except ManifestNotRead as error:
            raise KafkaUnavailable(str(error)) from None
    return count


def refuse_marks(transactions: Transactions, store: BatchStore) -> None:
    """See what an at-least-once harvester may have left.

    Raises:
        MarkedRowsFound: if there are rows with its marks, and they are not accepted.
    """
    marked = store.marked()
    if not marked.number:
        return
    what = f"{marked.number} rows (ids {marked.first} to {marked.last}) carry the mark of an at-least-once harvester"
    if not transactions.accept_marked:
        raise MarkedRowsFound(
            f"{what} that did not stop in good order: those that it had sent would be repeated. Let an at-least-once "
            "harvester drain them, or accept the possible repeats with acceptMarked"
        )
    _log.warning("%s; those that it had sent are repeated", what)


def fence(transactions: Transactions, over: Callable[[], bool]) -> RecordProducer:
    """A producer of this transactional.id, having fenced the last one.

    Raises:
        KafkaUnavailable: if that cannot be done.
    """
    producer = transactions.new_producer()
    ended = producer.init(over)
    if ended is not None:
        producer.discard()
        raise KafkaUnavailable(f"transactional.id {transactions.transactional_id}: {ended.reason}")
    return producer


def ledger_after_fence(
    transactions: Transactions, producer: RecordProducer, over: Callable[[], bool], *, stays_open: bool = False
) -> Ledger:
    """What the last transactions were; the one in which that was found out may stay open.

    Raises:
        KafkaUnavailable: if that cannot be found out.
        TrackingTopicError: if the tracking topic holds something else.
    """
    ledger = (transactions.open if stays_open else transactions.ledger)(producer, over)
    if isinstance(ledger, Ended):
        raise KafkaUnavailable(f"tracking topic {transactions.tracking_topic}: {ledger.reason}")
    transactions.refuse_foreign(ledger)
    return ledger


def _ledger(transactions: Transactions, over: Callable[[], bool]) -> Ledger:
    producer = fence(transactions, over)
    try:
        return ledger_after_fence(transactions, producer, over)
    finally:
        producer.discard()
