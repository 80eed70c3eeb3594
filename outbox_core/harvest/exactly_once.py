"""Exactly once: every row is published in one Kafka transaction, together with the manifest that says so.

One `ExactlyOnce` lives as long as one leadership and runs terms. A **term** begins when leadership is gained, and again
after anything that leaves the outcome of a transaction unknown:

1. A new producer with the outbox's fixed transactional.id calls `init_transactions()`: the last owner is fenced, and
   its transaction is settled one way or the other.
2. Only now the last committed manifest is read from the tracking topic. What it lists is in Kafka for certain; those
   rows are deleted. Only when that is committed is the table scanned for the first time.
3. Batches, one transaction each; the stages of neighbouring batches overlap:

       scan n+1    ~~~~~~~~~
       transaction n     begin --- opening, records ----| manifest, commit ------|
       purge n-1           ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~|                 |~~~ purge n

Six rules make it exactly once (docs/explanation-exactly-once.md has all of them, and argues them crash by crash):

- **The purge of batch n is committed before the commit of batch n+1 is sent.** So the last manifest alone lists every
  row that can be in Kafka and still in the table.
- **A scan excludes a set of ids, never everything up to an id**, which would lose late commits. The set holds every row
  scanned whose purge is not committed. It is copied before the scan is sent, and that copy applies.
- **Every abort and every end of a term throws away what was scanned and not published**, and waits for the stages
  under way, before anything is scanned again. Ids that await their purge stay excluded.
- **A delete matches (id, create_time)**, since ids come back.
- **No transaction begins in an epoch in which a request may be late** (`transaction`): it would end, or be part of, a
  transaction that it was not sent for.
- **A transaction begins with its opening, and its manifest waits until all records are acknowledged.** So one that was
  ended in the middle is noticed, and read back from its topics (`read_back`).

Kafka does the fencing; the election only decides who tries. A fence therefore ends the term, not the leadership: a
transaction that was open for too long is fenced with no rival in sight. The next term begins once a heartbeat of our
own, sent after the fence, has come back, after a pause with jitter.

A transaction that Kafka refuses because of a record is aborted, and its records are set aside and tried in ever smaller
groups until the one that fails alone is found (`trials`). It is held, with its key, or goes to the dead-letter topic in
a transaction like any other, manifest included (`letters`). Everything else goes on.
"""

from __future__ import annotations

import random
from uuid import UUID

from outbox_core.election.leadership import now
from outbox_core.harvest.letters import Letters
from outbox_core.harvest.recovery import Transactions
from outbox_core.harvest.rights import Rights
from outbox_core.harvest.surroundings import DeadLetters, Surroundings, Timing
from outbox_core.harvest.suspicion import Suspicion
from outbox_core.harvest.term import Term
from outbox_core.harvest.waiting import Waiting

_TICK_SECONDS = 0.05
_FIRST_REST_SECONDS = 0.2
_LONGEST_REST_SECONDS = 5.0


class ExactlyOnce:
    """One leadership's terms.

    Args:
        leader_id: ID of the leadership.
        timing: limits.
        surroundings: what to work with.
        transactions: what to publish with.
        dead_letters: where bad records go.
        drain: whether to end once the table is empty.

    Attributes:
        leader_id: ID of the leadership.
        drained: whether the table was found empty; set by its terms.
        in_flight_records: records in the open transaction.
        marks_are_settled: whether one of its terms has seen to the marks of an at-least-once leader.
        letters: its dead letters.
        suspicion: what its terms have ended with.
    """

    def __init__(
        self,
        leader_id: UUID,
        timing: Timing,
        surroundings: Surroundings,
        transactions: Transactions,
        *,
        dead_letters: DeadLetters,
        drain: bool = False,
    ) -> None:
        self.leader_id = leader_id
        self.drain = drain
        self.drained = False
        self.in_flight_records = 0
        self.marks_are_settled = False
        self.suspicion = Suspicion(timing.mark_query_records)
        rights = Rights(dead_letters, transactions.tracking_topic, surroundings.grant_write)
        self.letters = Letters(dead_letters, surroundings, Waiting(self.over, timing, surroundings), rights)
        self._timing = timing
        self._with = surroundings
        self._transactions = transactions
        self._dead_letters = dead_letters
        self._stopping = False

    def stop(self) -> None:
        """Ask `run` to finish the transaction under way and return. From any thread."""
        self._stopping = True
        self._with.wake.set()

    def over(self) -> bool:
        """Whether nothing more is to be begun. Once true it stays true, even if the lease is renewed after all."""
        self._stopping = self._stopping or self.drained or not self.leads()
        return self._stopping

    def leads(self) -> bool:
        """Whether the lease of this leadership is valid now."""
        leadership = self._with.elector.leadership
        return leadership is not None and leadership.leader_id == self.leader_id and now() < leadership.deadline

    def run(self) -> None:
        """Harvest, term after term, until the leadership ends, `stop` is called or, when draining, the table is empty.

        Raises:
            OutboxError: if going on could repeat or lose a record.
        """
        rest = _FIRST_REST_SECONDS
        while not self.over():
            term = Term(self, self._timing, self._with, self._transactions, self._dead_letters)
            ended = term.run()
            self.in_flight_records = 0
            if ended is None:
                return
            self._with.kafka.began(ended.reason)
            rest = _FIRST_REST_SECONDS if term.committed else min(_LONGEST_REST_SECONDS, rest * 2)
            self._wait_for_fresh_lease(random.uniform(0.5, 1.0) * rest)  # noqa: S311  jitter

    def _wait_for_fresh_lease(self, rest: float) -> None:
        """Wait until a heartbeat that was sent from now on has come back, and for the pause in any case."""
        began = now()
        while not self.over():
            leadership = self._with.elector.leadership
            renewed_at = leadership.deadline - self._transactions.heartbeat_timeout if leadership is not None else 0.0
            if renewed_at > began and now() >= began + rest:
                return
            self._with.wake.wait(_TICK_SECONDS)
            self._with.wake.clear()
