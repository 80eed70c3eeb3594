"""Dead letters of at-least-once delivery: held records that go to the dead-letter topic, and out of the table.

A record is asked for by its hold (`dead_letter`): by a harvester whose `on_poison` says so, or by somebody with
`outbox hold dead-letter`. The steps are

    read the rows --> publish them, each alone --> delete row and hold together

and until the last one is committed the hold stands, so nothing of the key moves. A crash in between repeats the dead
letter, as it may repeat any record. What the dead-letter topic refuses is held as before, with that error: nothing is
ever deleted that is not in Kafka.

Belongs to the harvest thread; one batch at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from outbox_core.election.leadership import now
from outbox_core.errors import OutboxError, StoreUnavailable
from outbox_core.harvest.outage import Outage
from outbox_core.harvest.publisher import Failure, Publisher, dead_letter
from outbox_core.harvest.surroundings import DeadLetters, Surroundings, Timing
from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.kafka import KafkaError
from outbox_core.ports import HoldSet, OutboxStore, StoredRecord

_log = logging.getLogger(__name__)

BATCH = 50  # values may be large
RETRY_SECONDS = 5.0
_TELL_AGAIN_SECONDS = 60.0


def trouble_with(topic: str) -> Outage:
    """Return the log of dead letters that wait: the table shows them as held, like any that nobody asks for."""
    return Outage(f"dead letters for topic {topic}", _log, again_seconds=_TELL_AGAIN_SECONDS)


def refusal_of(error: KafkaError, grant_write: str) -> str:
    """Why a dead letter stays held, and what to do if a right is missing."""
    advice = f"; {grant_write}" if verdict_on(error) is Verdict.FORBIDDEN else ""
    return f"the dead-letter topic refused it: {error.str()}{advice}"


class Burials:
    """The dead letters of one leadership.

    Args:
        dead_letters: where they go.
        timing: limits.
        surroundings: what to work with.
        publisher: sends them.
    """

    def __init__(
        self, dead_letters: DeadLetters, timing: Timing, surroundings: Surroundings, publisher: Publisher
    ) -> None:
        self._dead_letters = dead_letters
        self._timing = timing
        self._with = surroundings
        self._publisher = publisher
        self._trouble = trouble_with(dead_letters.topic)
        self._is_topic_there = False
        self._not_before = 0.0
        self._done: set[int] = set()  # buried, and perhaps still among the requests that were read before
        self._fetching: Future[tuple[StoredRecord, ...]] | None = None
        self._errors: dict[int, str] = {}
        self._ready: deque[StoredRecord] = deque()
        self._sent: dict[int, StoredRecord] = {}
        self._arrived: list[StoredRecord] = []
        self._refused: list[Failure] = []
        self._burying: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether any are under way."""
        return bool(self._fetching or self._ready or self._sent or self._arrived or self._refused or self._burying)

    @property
    def has_ready(self) -> bool:
        """True if dead letters wait to be sent."""
        return bool(self._ready)

    @property
    def is_burying(self) -> bool:
        """Whether rows are being deleted, or are about to be."""
        return bool(self._arrived or self._refused or self._burying)

    def due_in(self) -> float:
        """Seconds until something can be begun, if nothing else happens."""
        waits = self._not_before - now()
        return waits if waits > 0 else 0.05 if self._ready else float("inf")

    def step(self, holds: HoldSet) -> None:
        """Begin whatever can be begun."""
        self._collect_rows()
        self.finish()
        if not holds.requests:
            self._trouble.dismissed()
        if not self.is_busy and holds.requests and now() >= self._not_before:
            self._fetch(holds)

    def finish(self) -> None:
        """Delete what has arrived, and begin nothing else."""
        self._collect_buried()
        if self._burying is None and not self._sent and (self._arrived or self._refused) and now() >= self._not_before:
            self._bury()

    def take(self) -> list[StoredRecord]:
        """Dead letters to send now, each alone."""
        if not self._ready:
            return []
        letters = list(self._ready)
        self._ready.clear()
        self._sent.update((letter[0], letter) for letter in letters)
        return letters

    def put_back(self, letters: Iterable[StoredRecord]) -> None:
        """Letters of `take` that could not be sent."""
        for letter in letters:
            del self._sent[letter[0]]
            self._ready.append(letter)

    def delivered(self, records: list[StoredRecord]) -> list[StoredRecord]:
        """Take the dead letters out of what has arrived; return the rest."""
        letters = [record for record in records if self._sent.get(record[0]) is record]
        if not letters:
            return records
        self._trouble.ended()
        for letter in letters:
            del self._sent[letter[0]]
        self._arrived += letters
        self._with.metrics.dead_letters(len(letters))
        mine = {id(letter) for letter in letters}
        return [record for record in records if id(record) not in mine]

    def failed(self, failures: list[Failure]) -> list[Failure]:
        """Take the dead letters out of what has failed; return the rest."""
        mine = [failure for failure in failures if self._sent.get(failure.record[0]) is failure.record]
        for failure in mine:
            del self._sent[failure.record[0]]
            verdict = failure.verdict
            if verdict in (Verdict.RECORD, Verdict.FORBIDDEN):
                self._refused.append(failure)
            else:
                self._is_topic_there = self._is_topic_there and verdict is not Verdict.AWAY  # it is made anew
                self._rest(failure.error.str())
        taken = {id(failure) for failure in mine}
        return [failure for failure in failures if id(failure) not in taken]

    def _fetch(self, holds: HoldSet) -> None:
        self._done.intersection_update(holds.requests)
        ids = sorted(holds.requests.keys() - self._done)[:BATCH]
        if not ids:
            return
        self._errors = {identity: holds.requests[identity] for identity in ids}
        dead_letters, is_there = self._dead_letters, self._is_topic_there

        def fetch(store: OutboxStore) -> tuple[StoredRecord, ...]:
            if not is_there:
                dead_letters.ensure()
            return tuple(store.fetch(ids))

        self._fetching = self._with.marker.submit(fetch)

    def _collect_rows(self) -> None:
        if self._fetching is None or not self._fetching.done():
            return
        fetching, self._fetching = self._fetching, None
        try:
            rows = fetching.result()
        except StoreUnavailable as error:
            self._with.database.began(error)
            self._not_before = now() + self._timing.io_error_backoff
            return
        except OutboxError as error:
            self._rest(str(error))
            return
        self._is_topic_there = True
        self._done.update(self._errors)  # those that are not there any more, too
        topic = self._dead_letters.topic
        self._ready.extend(dead_letter(row, topic, self._errors[row[0]]) for row in rows)

    def _rest(self, why: str) -> None:
        self._trouble.began(why)
        self._not_before = now() + RETRY_SECONDS
        self._done.clear()

    def _bury(self) -> None:
        arrived = list(self._arrived)
        reasons = {failure.record[0]: self._why_kept(failure) for failure in self._refused}

        def bury(store: OutboxStore) -> None:
            if arrived:
                store.bury([letter[0] for letter in arrived], [letter[7] for letter in arrived])
            for reason in set(reasons.values()):
                store.keep([identity for identity, why in reasons.items() if why == reason], reason)

        self._burying = self._with.purger.submit(bury)

    def _why_kept(self, failure: Failure) -> str:
        return refusal_of(failure.error, self._with.grant_write)

    def _collect_buried(self) -> None:
        if self._burying is None or not self._burying.done():
            return
        burying, self._burying = self._burying, None
        try:
            burying.result()
        except StoreUnavailable as error:
            self._with.database.began(error)
            self._not_before = now() + self._timing.io_error_backoff
            return
        for failure in self._refused:
            _log.warning("record %d stays held: %s", failure.record[0], self._why_kept(failure))
        self._arrived, self._refused = [], []
