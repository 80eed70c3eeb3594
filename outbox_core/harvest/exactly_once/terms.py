"""Exactly once: every row is published in one Kafka transaction, together with the manifest that says so.

An `ExactlyOnce` lives as long as one leadership and runs terms. A **term** begins when leadership is gained, and again
after anything that leaves the outcome of a transaction unknown:

1. A new producer with the outbox's fixed transactional.id calls `init_transactions()`, which fences the last owner and
   settles its transaction.
2. Only now the last committed manifest is read from the tracking topic. Its rows are in Kafka for certain, and are
   deleted. Only when that is committed is the table scanned for the first time.
3. Batches, one transaction each; the stages of neighbouring batches overlap:

       scan n+1    ~~~~~~~~~
       transaction n     begin --- opening, records ----| manifest, commit ------|
       purge n-1           ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~|                 |~~~ purge n

Six rules make it exactly once (docs/explanation-exactly-once.md argues all of them crash by crash):

- **The purge of batch n is committed before the commit of batch n+1 is sent.** So the last manifest alone lists every
  row that can be in Kafka and still in the table.
- **A scan excludes a set of ids, never everything up to an id**, which would lose late commits. The set holds every row
  scanned whose purge is not committed, as it was before the scan was sent.
- **Every abort and every end of a term throws away the rows that were scanned and not published**, and waits for the
  stages under way, before the next scan. Ids that await their purge stay excluded.
- **A delete matches (id, create_time)**, since ids come back. (Or the time as rounded since, if the column has lost
  digits of a second.)
- **No transaction begins in an epoch in which a request may be late** (`transaction`): it would end, or be part of, a
  transaction that it was not sent for.
- **A transaction begins with its opening, and its manifest waits until all records are acknowledged.** So one that was
  ended in the middle is noticed, and read back from its topics (`torn_batches`).

Kafka does the fencing; the election only decides who tries. A fence ends the term, not the leadership: a transaction
that was open for too long is fenced without a rival. The next term begins after a pause with jitter, once a heartbeat
of our own, sent after the fence, has come back.
"""

from __future__ import annotations

import logging
import random
from uuid import UUID

from outbox_core.election.lease import now
from outbox_core.errors import KafkaUnavailable, MarkedRowsFound, TrackingTopicError
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.exactly_once.term import Term
from outbox_core.harvest.failures.failed_transactions import FailedTransactions
from outbox_core.harvest.steps import BEGIN
from outbox_core.harvest.store_calls import LeadershipWait
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.transactions import Ended

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_FIRST_BACKOFF_SECONDS = 0.2
_LONGEST_BACKOFF_SECONDS = 5.0


class ExactlyOnce:
    """The terms of one leadership, and their shared state: failures, and if marks are settled."""

    def __init__(
        self,
        leader_id: UUID,
        ctx: HarvestContext,
        transactions: TransactionalIdentity,
        *,
        drain: bool = False,
    ) -> None:
        self.leader_id = leader_id
        self.drain = drain
        self.drained = False
        self.in_flight_records = 0
        self.marks_are_settled = False
        self.failures = FailedTransactions(ctx, LeadershipWait(self.over, ctx), transactions.tracking_topic)
        self._ctx = ctx
        self._transactions = transactions
        self._stopping = False

    def stop(self) -> None:
        """Ask `run` to finish the transaction under way and return. From any thread."""
        self._stopping = True
        self._ctx.wake.set()

    def over(self) -> bool:
        """Return True if no more may be started; for good, even if the lease is renewed after all."""
        self._stopping = self._stopping or self.drained or not self.leads()
        return self._stopping

    def leads(self) -> bool:
        """Return True if the lease of this leadership is valid now."""
        leadership = self._ctx.elector.leadership
        return leadership is not None and leadership.leader_id == self.leader_id and now() < leadership.deadline

    def run(self) -> None:
        """Harvest, term after term, until the leadership ends, `stop` is called or a drained table is empty."""
        backoff = _FIRST_BACKOFF_SECONDS
        try:
            while not self.over():
                term = Term(self, self._ctx, self._transactions)
                ended = self._run(term)
                if ended is None:
                    return
                if ended.is_expiry:
                    _log.info("%s; a new term begins", ended.reason)
                else:
                    self._ctx.kafka.failed(ended.reason)
                backoff = _FIRST_BACKOFF_SECONDS if term.committed else min(_LONGEST_BACKOFF_SECONDS, backoff * 2)
                self._wait_for_fresh_lease(random.uniform(0.5, 1.0) * backoff)  # noqa: S311  jitter
        finally:
            self.failures.end()

    def _run(self, term: Term) -> Ended | None:
        try:
            return term.run()
        except KafkaUnavailable as error:
            return Ended(str(error))
        except (TrackingTopicError, MarkedRowsFound) as error:
            if self._ctx.is_starting:
                raise
            self._ctx.metrics.activity.duty.dropped(BEGIN)  # a right or a topic that is missing is so for all
            return Ended(str(error))

    def _wait_for_fresh_lease(self, seconds: float) -> None:
        """Wait until a heartbeat that was sent from now on has come back, and for the pause in any case."""
        began = now()
        while not self.over():
            leadership = self._ctx.elector.leadership
            renewed_at = leadership.deadline - self._transactions.heartbeat_timeout if leadership is not None else 0.0
            if renewed_at > began and now() >= began + seconds:
                return
            self._ctx.wake.wait(_TICK_SECONDS)
            self._ctx.wake.clear()
