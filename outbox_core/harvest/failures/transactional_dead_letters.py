"""Dead letters of exactly-once delivery, on the harvest thread.

A dead letter is published in a transaction with a manifest, like any record, and its row and hold are deleted together
once that is committed. The end of a transaction of dead letters decides:

    committed ---------------------------------> they are done
    one of them is refused --------------------> it stays held, with the error; one of several is tried alone first
    we may not write to the topic -------------> they stay held, with the error; the others wait
    anything else -----------------------------> they wait, twice as long each time

Ordinary records must not wait for that. A transaction of dead letters is followed by an ordinary one; after a failure
the next has a tenth of the backoff before it to arrive; and backoffs outlast a term, which a refusal may end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outbox_core.election.lease import now
from outbox_core.errors import OutboxError, StoreUnavailable
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.dead_letters import BATCH, RETRY_SECONDS, DeadLetterRequests, Requests
from outbox_core.harvest.failures.denied_topics import DeniedTopics
from outbox_core.harvest.store_calls import LeadershipWait, StoreCall
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import ErrorKind, kind_of
from outbox_core.kafka.messages import DeadLetter, Failure
from outbox_core.kafka.transactions import Aborted, Committed, Ended, Outcome
from outbox_core.stores.interface import StoredRecord

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_SECONDS = 10.0
_LEAST_PATIENCE_SECONDS = 1.0
_DATABASE_BACKOFF_SECONDS = 1.0


class TransactionalDeadLetters(DeadLetterRequests):
    """The dead letters of one leadership; its terms work on them one after the other."""

    def __init__(self, ctx: HarvestContext, wait: LeadershipWait, denied: DeniedTopics) -> None:
        super().__init__(ctx)
        self._wait = wait
        self._denied = denied
        self._backoff = 0.0
        self._at_once = BATCH

    @property
    def patience(self) -> float | None:
        """Seconds to wait for their arrival; None: as for any transaction."""
        return max(_LEAST_PATIENCE_SECONDS, self._backoff / 10) if self._backoff else None

    def due_in(self, requests: Requests) -> float:
        """Return the seconds until some can be published."""
        return max(0.0, self._not_before - now()) if requests.keys() - self._done else float("inf")

    def next(self, requests: Requests) -> Sequence[StoredRecord]:
        """Return dead letters to publish now."""
        if not requests:
            self._outage.forget()
        ids = self._next_ids(requests, self._at_once)
        if self.due_in(requests):
            return ()
        call: StoreCall[list[DeadLetter]] = StoreCall(self._ctx.marker, self._ctx)
        call.start(self._fetch(ids, requests))
        if not self._wait.until_done(call):
            return ()
        try:
            letters = call.result()
        except StoreUnavailable:
            self._not_before = now() + _DATABASE_BACKOFF_SECONDS
            return ()
        except OutboxError as error:
            self._back_off(str(error))
            return ()
        self._topic_exists = True
        self._done.update(set(ids) - {letter.id for letter in letters})
        return letters

    def concluded(self, letters: Sequence[StoredRecord], failures: Sequence[Failure], outcome: Outcome) -> None:
        """Draw the consequences of a transaction of dead letters, from the reports of the client and of deliveries."""
        is_committed, cause = isinstance(outcome, Committed), _cause_of(outcome)
        errors = [failure.error for failure in failures] + ([cause] if cause is not None else [])
        tried = {record.id for record in letters}.union(failure.record.id for failure in failures)
        if self._are_denied(sorted(tried), errors):
            return
        kinds = [failure.kind for failure in failures] + ([kind_of(cause)] if cause is not None else [])
        if ErrorKind.UNKNOWN_TOPIC in kinds:
            self._topic_exists = False
        if is_committed:
            self._done.update(letter.id for letter in letters)
            self._backoff = 0.0
            self._outage.recovered()
        if not failures and cause is not None:
            failures = [Failure(letter, cause, alone=len(letters) == 1) for letter in letters]
        refused = [failure for failure in failures if failure.kind is ErrorKind.POISON]
        if not is_committed and self._at_once > 1 and not all(failure.alone for failure in refused):
            self._at_once = 1  # one of them is to blame for the others
            return
        for failure in refused:
            self._keep([failure.record.id], failure.error)
        if refused:
            return
        if is_committed:
            self._at_once = BATCH
        elif failures or isinstance(outcome, Ended):  # else it was our own choice
            self._back_off(outcome.reason if isinstance(outcome, Ended) else failures[0].error.str())

    def _are_denied(self, ids: Sequence[int], errors: Sequence[KafkaError]) -> bool:
        """Return True if we may not write to the dead-letter topic; then keep these held, and let others wait."""
        error = next((error for error in errors if kind_of(error) is ErrorKind.UNAUTHORIZED), None)
        if error is None or not self._denied.among({self._ctx.dead_letters.topic}):
            return False
        self._keep(ids, error)
        self._back_off(f"{error.str()}; {self._ctx.grant_write}")
        return True

    def _keep(self, ids: Sequence[int], error: KafkaError) -> None:
        why = self._refusal(error)
        for identity in ids:
            _log.warning("record %d stays held: %s", identity, why)
        self._wait.retry_until_done(self._ctx.marker, lambda store: store.holds.refuse_dead_letters(ids, why))
        self._done.update(ids)

    def _back_off(self, why: str) -> None:
        self._outage.failed(why)
        self._backoff = min(_LONGEST_BACKOFF_SECONDS, 2 * self._backoff or RETRY_SECONDS)
        self._not_before = now() + self._backoff


def _cause_of(outcome: Outcome) -> KafkaError | None:
    if isinstance(outcome, Aborted):
        return outcome.error
    return outcome.cause if isinstance(outcome, Ended) else None
