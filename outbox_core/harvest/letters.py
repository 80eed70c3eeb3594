"""Dead letters of exactly-once delivery: held records that go to the dead-letter topic, and out of the table.

A record is asked for by its hold: by a harvester whose `on_poison` says so, or by `outbox hold dead-letter`. It is
published in a transaction with a manifest, like any record, and its row and hold are deleted together once that is
committed. What becomes of a transaction of dead letters:

    committed ---------------------------------> they are done
    one of them is refused --------------------> it stays held, with the error; one of several is tried alone first
    the topic may not be written to -----------> they stay held, with the error; the others wait
    anything else -----------------------------> they wait, twice as long each time

None of that may keep ordinary records waiting. A transaction of dead letters is followed by an ordinary one; after a
failure the next is waited for a tenth of the rest before it; and the rests outlast a term, which a refusal may end.

Belongs to the harvest thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from outbox_core.election.leadership import now
from outbox_core.errors import OutboxError, StoreUnavailable
from outbox_core.harvest.burials import BATCH, RETRY_SECONDS, refusal_of, trouble_with
from outbox_core.harvest.publisher import Failure, dead_letter
from outbox_core.harvest.rights import Rights
from outbox_core.harvest.surroundings import DeadLetters, Surroundings
from outbox_core.harvest.transaction import Aborted, Committed, Ended, Outcome
from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.harvest.waiting import Waiting
from outbox_core.kafka import KafkaError
from outbox_core.ports import OutboxStore, StoredRecord

_log = logging.getLogger(__name__)

_ID: Final = 0
_LONGEST_REST_SECONDS = 10.0
_LEAST_PATIENCE_SECONDS = 1.0
_DATABASE_REST_SECONDS = 1.0

Requests = Mapping[int, str]
"""Records that are asked for, with what is known of their error."""


class Letters:
    """The dead letters of one leadership; its terms work on them one after the other.

    Args:
        dead_letters: where they go.
        surroundings: what to work with.
        waiting: waits for statements.
        rights: tells where we may not write.

    Attributes:
        topic: the dead-letter topic.
    """

    def __init__(self, dead_letters: DeadLetters, surroundings: Surroundings, waiting: Waiting, rights: Rights) -> None:
        self.topic = dead_letters.topic
        self._ensure = dead_letters.ensure
        self._with = surroundings
        self._waiting = waiting
        self._rights = rights
        self._trouble = trouble_with(self.topic)
        self._done: set[int] = set()  # as far as the requests read last still list them
        self._not_before = 0.0
        self._rest = 0.0
        self._at_once = BATCH
        self._is_topic_there = False

    @property
    def patience(self) -> float | None:
        """How many seconds to wait until they have arrived; None to wait as for any transaction."""
        return max(_LEAST_PATIENCE_SECONDS, self._rest / 10) if self._rest else None

    def due_in(self, requests: Requests) -> float:
        """Seconds until some are to be published."""
        return max(0.0, self._not_before - now()) if requests.keys() - self._done else float("inf")

    def next(self, requests: Requests) -> Sequence[StoredRecord]:
        """Dead letters to publish now."""
        self._done.intersection_update(requests)
        if not requests:
            self._trouble.dismissed()
        if self.due_in(requests):
            return ()
        ids = sorted(requests.keys() - self._done)[: self._at_once]
        rows = self._fetch(ids)
        if rows is None:
            return ()
        self._done.update(set(ids) - {row[_ID] for row in rows})
        return [dead_letter(row, self.topic, requests[row[_ID]]) for row in rows]

    def _fetch(self, ids: Sequence[int]) -> Sequence[StoredRecord] | None:
        """The rows; None if they cannot be had now."""
        ensure = None if self._is_topic_there else self._ensure

        def fetch(store: OutboxStore) -> Sequence[StoredRecord]:
            if ensure is not None:
                ensure()
            return store.fetch(ids)

        fetching = self._with.marker.submit(fetch)
        if not self._waiting.until_done(fetching):
            return None
        try:
            rows = fetching.result()
        except StoreUnavailable as error:
            self._with.database.began(error)
            self._not_before = now() + _DATABASE_REST_SECONDS
            return None
        except OutboxError as error:
            self._wait(str(error))
            return None
        self._is_topic_there = True
        return rows

    def concluded(self, letters: Sequence[StoredRecord], failures: Sequence[Failure], outcome: Outcome) -> None:
        """A transaction of dead letters has come to its end.

        Args:
            letters: those that were in it.
            failures: what the client and delivery reports said.
            outcome: how it ended.

        Raises:
            TrackingTopicError: if it failed because we may not write to the tracking topic.
        """
        cause = _cause_of(outcome)
        errors = [failure.error for failure in failures] + ([cause] if cause is not None else [])
        tried = {record[_ID] for record in letters}.union(failure.record[_ID] for failure in failures)
        if self._are_forbidden(sorted(tried), errors):
            return
        verdicts = [failure.verdict for failure in failures] + ([verdict_on(cause)] if cause is not None else [])
        if Verdict.AWAY in verdicts:
            self._is_topic_there = False  # it is made anew
        if isinstance(outcome, Committed):
            self._done.update(letter[_ID] for letter in letters)
            self._rest = 0.0
            self._trouble.ended()
        if not failures and cause is not None:
            failures = [Failure(letter, cause, alone=len(letters) == 1) for letter in letters]
        refused = [failure for failure in failures if failure.verdict is Verdict.RECORD]
        if not isinstance(outcome, Committed) and self._at_once > 1 and not all(failure.alone for failure in refused):
            self._at_once = 1  # one of them is to blame for the others
            return
        for failure in refused:
            self._keep([failure.record[_ID]], failure.error)
        if refused:
            return
        if isinstance(outcome, Committed):
            self._at_once = BATCH
        elif failures or isinstance(outcome, Ended):  # else it was our own choice
            self._wait(outcome.reason if isinstance(outcome, Ended) else failures[0].error.str())

    def _are_forbidden(self, ids: Sequence[int], errors: Sequence[KafkaError]) -> bool:
        """See whether we may not write to the dead-letter topic; if so they stay held, and others wait."""
        error = next((error for error in errors if verdict_on(error) is Verdict.FORBIDDEN), None)
        if error is None or not self._rights.missing_for({self.topic}):
            return False
        self._keep(ids, error)
        self._wait(f"{error.str()}; {self._with.grant_write}")
        return True

    def _keep(self, ids: Sequence[int], error: KafkaError) -> None:
        why = refusal_of(error, self._with.grant_write)
        for identity in ids:
            _log.warning("record %d stays held: %s", identity, why)
        self._waiting.insist(self._with.marker, lambda store: store.keep(ids, why))
        self._done.update(ids)

    def _wait(self, why: str) -> None:
        self._trouble.began(why)
        self._rest = min(_LONGEST_REST_SECONDS, 2 * self._rest or RETRY_SECONDS)
        self._not_before = now() + self._rest


def _cause_of(outcome: Outcome) -> KafkaError | None:
    """What a transaction was aborted for, or broke its producer."""
    if isinstance(outcome, Aborted):
        return outcome.error
    return outcome.cause if isinstance(outcome, Ended) else None
