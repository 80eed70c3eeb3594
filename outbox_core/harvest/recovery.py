"""The beginning of a term: settle the last transaction and delete its published rows.

The order matters. `init_transactions()` comes first: it fences the last owner of the transactional.id and waits until
its transaction is committed or aborted. Only then is the last committed manifest read, up to a barrier that we write
(`tracking`). Its rows are in Kafka for certain; the table is read only once they are deleted. An opening behind the
last manifest belongs to a torn transaction: its rows are read back from Kafka (`torn_batches`) and deleted too.

At-least-once delivery does the same where a tracking topic exists, so that a change of mode repeats no record. Both do
it for each shard of a relay on Spark too: a transactional.id with a manifest, like the harvester's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from outbox_core.election.lease import now
from outbox_core.errors import KafkaUnavailable, MarkedRowsFound, TrackingTopicError, must
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.steps import BEGIN, HOLDS, STATEMENT, WHOLE_TABLE, Step
from outbox_core.harvest.store_calls import LeadershipWait
from outbox_core.kafka.identity import Failpoint, TransactionalIdentity
from outbox_core.kafka.manifest import Opening
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.topics import partition_count
from outbox_core.kafka.tracking import ForeignLedger, Ledger, ManifestNotRead
from outbox_core.kafka.transactions import Ended
from outbox_core.printable import plural
from outbox_core.stores.interface import OutboxStore, StoredRecord, ids_and_times, may_hold

_log = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE = 1_000
_LONGEST_BACKOFF_SECONDS = 5.0
_TOO_LATE = Ended("the leadership ended before the last term was settled")


class Recovery:
    """The settlement of the last term; `ledger` is the settled state of the tracking topic."""

    def __init__(self, transactions: TransactionalIdentity, over: Callable[[], bool], ctx: HarvestContext) -> None:
        self._transactions = transactions
        self._over = over
        self._ctx = ctx
        self._wait = LeadershipWait(over, ctx)
        self.ledger = Ledger()
        self._server: str | None = None
        self._is_strict = True  # exactly-once delivery obeys the tracking topic, so that must be ours alone

    def settle(self, producer: RecordProducer) -> Ended | None:
        """Fence the last owner, settle its transaction, delete its published rows; the same for a relay's shards.

        Raises KafkaUnavailable, and TrackingTopicError for a topic that is not ours or lacks a right.
        """
        try:  # the topic may have been deleted, and created anew by the broker
            self._transactions.ensure_topic()
        except (KafkaUnavailable, TrackingTopicError) as error:
            return Ended(str(error))
        return self._settle(self._transactions, producer) or self._settle_shards()

    def _settle_shards(self) -> Ended | None:
        for shard in self._transactions.relay_shards():
            ended = self._settle_alone(shard)
            if ended is not None:
                return ended
            self._ctx.metrics.activity.goes_on(BEGIN)  # there may be hundreds
        return None

    def _settle(self, transactions: TransactionalIdentity, producer: RecordProducer) -> Ended | None:
        ended = producer.init(self._patience(transactions))
        if ended is not None:
            return ended
        transactions.reached(Failpoint.AFTER_INIT)
        with self._ctx.metrics.activity.step("the tracking topic"):
            ledger = transactions.ledger(producer, self._patience(transactions))
        if isinstance(ledger, Ended):
            return ledger
        if self._is_strict:
            transactions.refuse_foreign(ledger)
        elif ledger.foreign:
            _log.warning("tracking topic %r: %s is ignored", transactions.tracking_topic, ledger.foreign)
        has_moved = transactions.is_of_other_server(ledger, self.server_id())
        manifest = ledger.manifest
        if manifest is not None and not self._delete(manifest.ids, manifest.create_times):
            return _TOO_LATE
        ended = None if ledger.opening is None else self._settle_torn(transactions, ledger.opening)
        known = ended or self._leave_trace(transactions, producer, ledger, has_moved=has_moved)
        if isinstance(known, Ended):
            return known
        if transactions is self._transactions:
            self.ledger = known
        return None

    def _leave_trace(
        self, transactions: TransactionalIdentity, producer: RecordProducer, settled: Ledger, *, has_moved: bool
    ) -> Ledger | Ended:
        # In the other mode no manifest follows, and a deposed leader that replaces its producer must see the ledger.
        # A torn batch must not be read back by every term, from topics that grow.
        is_other_mode = transactions is self._transactions and not self._is_strict
        if not has_moved and settled.opening is None and not is_other_mode:
            return settled
        return transactions.adopt(producer, self.server_id(), settled, self._patience(transactions))

    def _patience(self, transactions: TransactionalIdentity) -> Callable[[], bool]:
        """Return a function that says when to give up: a transaction of ours is open, and ends after its time-out."""
        give_up_at = now() + transactions.timeout
        return lambda: self._over() or now() > give_up_at

    def server_id(self) -> str:
        """Return the database server's ID; '' where it is withheld, or if the leadership ends first."""
        if self._server is None:
            self._server = self._ask(lambda store: store.server_id())
        return self._server or ""

    def _settle_torn(self, transactions: TransactionalIdentity, opening: Opening) -> Ended | None:
        try:
            for rows in transactions.read_torn(opening, self._over, self._find):
                strange = [row.id for row in rows if not opening.first <= row.id <= opening.last]
                must(not strange, "only rows of a torn transaction must be deleted for it; not %s", strange)
                if not self._delete(*ids_and_times(rows)):
                    return _TOO_LATE
        except ManifestNotRead as error:
            return Ended(str(error))
        return None

    def _find(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        found = self._wait.retry_until_done(self._ctx.purger, lambda store: store.find(ids))
        if found is None:
            raise ManifestNotRead(_TOO_LATE.reason)
        return found

    def _delete(self, ids: Sequence[int], create_times: Sequence[int]) -> bool:
        """Delete rows that are in Kafka; return False if the leadership ended first."""
        settled = self._wait.retry_until_done(self._ctx.purger, lambda store: store.delete_published(ids, create_times))
        if settled is not None:
            self._ctx.removal.recovered()
        if settled:
            _log.info("purged %s that the last term had published", plural(settled, "row"))
        return settled is not None

    def settle_if_tracked(self) -> None:
        """Settle the last exactly-once term, and a relay's, before at-least-once delivery; ignore foreign ledgers."""
        self._is_strict = False
        self._ctx.metrics.activity.tries_to(BEGIN)
        backoff = self._ctx.limits.io_error_backoff
        while not self._over():
            try:
                ended = self._settle_shards()
                if ended is None and partition_count(self._transactions.kafka, self._transactions.tracking_topic):
                    ended = self._settle_alone(self._transactions)
            except KafkaUnavailable as error:
                ended = Ended(str(error))
            except TrackingTopicError as error:
                if self._ctx.is_starting:
                    raise
                self._ctx.metrics.activity.duty.dropped(BEGIN)  # a right or a topic that is missing is so for all
                ended = Ended(str(error))
            if ended is None:
                self._ctx.metrics.activity.duty.succeeded(BEGIN)
                self._ctx.has_begun.set()
                return
            self._ctx.kafka.failed(ended.reason)
            self._wait.back_off(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    def _settle_alone(self, transactions: TransactionalIdentity) -> Ended | None:
        producer = transactions.new_producer()
        producer.step = self._ctx.metrics.activity.step
        try:
            return self._settle(transactions, producer)
        except ForeignLedger as error:
            if self._is_strict:
                raise
            _log.warning("%s; going on at least once without it", error)
            return None
        finally:
            producer.discard()

    def refuse_marks(self) -> None:
        """Hold the marked rows that an at-least-once leader left; raise MarkedRowsFound without a table of holds."""
        marked = self._ask_all(lambda store: store.marks.count())
        if marked is None:
            return
        ids = f"ids {marked.first} to {marked.last}"
        what = f"{plural(marked.number, 'row')} with the mark of an at-least-once leader ({ids})"
        if self._transactions.accept_marked:
            if marked.number:
                _log.warning("%s: what it had sent is repeated", what)
                self._ask_all(lambda store: store.marks.clear())
            released = self._ask_all(lambda store: store.marks.release_held())
            if released:
                _log.warning("released %s held for a mark", plural(released, "row"))
        elif marked.number:
            self._hold_marked(what)

    def _hold_marked(self, what: str) -> None:
        can_hold = self._ask(lambda store: may_hold(store.holds))
        if can_hold is False:
            raise MarkedRowsFound(
                f"{what}, which did not stop in good order: what it had sent would be repeated, and there is no "
                "table of holds to keep them back with (`outbox schema --only hold` makes it). Let an at-least-once "
                "harvester drain them, or accept the possible repeats with --accept-marked"
            )
        # All other rows go on, since a writer that may set `leader_id` must not be able to stop them.
        if can_hold:
            _log.warning(
                "%s, which did not stop in good order, or set by their writers: they are held, with their keys, as "
                "they may have been published already; see `outbox hold list`, with Django `manage.py outbox_hold "
                "list`. Release or skip them; --accept-marked releases all of them",
                what,
            )
            while self._ask_all(lambda store: store.marks.hold(_AT_ONCE)):
                pass

    def _ask(self, question: Callable[[OutboxStore], T], step: Step = STATEMENT) -> T | None:
        return self._wait.retry_until_done(self._ctx.marker, question, step)

    def _ask_all(self, question: Callable[[OutboxStore], T]) -> T | None:
        """Ask what reads the whole table. Nobody owes it, so something short that is owed comes before each try."""

        def ask(store: OutboxStore) -> T:
            with self._ctx.metrics.activity.statement(*HOLDS):
                store.holds.read()
            return question(store)

        return self._ask(ask, WHOLE_TABLE)
