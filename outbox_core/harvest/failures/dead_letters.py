"""Dead letters: held records that go to the dead-letter topic, and out of the table. At least once; the common part.

A harvester with `on_poison: dead-letter`, or an operator with `outbox hold dead-letter`, requests a record by its hold
(`dead_letter`). At least once, the steps are

    read the rows --> publish them, each alone --> delete row and hold together

and until the last one is committed the hold stands, so no record of the key moves. A crash in between repeats the dead
letter. One that is refused stays held, with the error: no row is ever deleted that is not in Kafka. On the harvest
thread, one batch at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from outbox_core.election.lease import now
from outbox_core.errors import OutboxError, RowsRemain, StoreUnavailable
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.policy import why_no_dead_letter
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import ErrorKind
from outbox_core.kafka.messages import DeadLetter, Failure, dead_letter
from outbox_core.outage import Outage
from outbox_core.stores.interface import HoldSet, OutboxStore, StoredRecord

_log = logging.getLogger(__name__)

BATCH = 50  # values may be large
RETRY_SECONDS = 5.0
_LOG_AGAIN_SECONDS = 60.0
_READY_SECONDS = 0.05

Requests = Mapping[int, str]
"""Ids of held records that are requested as dead letters, with their errors."""


class DeadLetterRequests:
    """Requested dead letters of either delivery."""

    def __init__(self, ctx: HarvestContext) -> None:
        self._ctx = ctx
        # The table shows waiting dead letters as held, like any that are not requested: so the log repeats it.
        self._outage = Outage(f"dead letters for topic {ctx.dead_letters.topic}", _log, _LOG_AGAIN_SECONDS)
        self._not_before = 0.0
        self._done: set[int] = set()  # published, and perhaps still among the requests that were read before
        self._topic_exists = False

    def _next_ids(self, requests: Requests, limit: int) -> list[int]:
        self._done.intersection_update(requests)
        return sorted(requests.keys() - self._done)[:limit]

    def _fetch(self, ids: Sequence[int], requests: Requests) -> Callable[[OutboxStore], list[DeadLetter]]:
        topic, exists = self._ctx.dead_letters, self._topic_exists

        def fetch(store: OutboxStore) -> list[DeadLetter]:
            if not exists:
                topic.ensure()
            return [dead_letter(row, topic.topic, requests[row.id]) for row in store.holds.fetch(ids)]

        return fetch

    def _refusal(self, error: KafkaError) -> str:
        return why_no_dead_letter(error, self._ctx.grant_write, self._ctx.limits.max_message_bytes)


class DeadLetters(DeadLetterRequests):
    """The dead letters of one leadership of at-least-once delivery."""

    def __init__(self, ctx: HarvestContext) -> None:
        super().__init__(ctx)
        self._ready: deque[StoredRecord] = deque()
        self._sent: dict[int, StoredRecord] = {}
        self._arrived: list[StoredRecord] = []
        self._refused: list[Failure] = []
        self._fetching: StoreCall[tuple[list[int], list[DeadLetter]]] = StoreCall(ctx.marker, ctx)
        self._deleting: StoreCall[None] = StoreCall(ctx.purger, ctx)

    @property
    def is_busy(self) -> bool:
        """True while any are under way."""
        return bool(self._fetching.is_running or self._ready or self._sent or self.is_deleting)

    @property
    def has_ready(self) -> bool:
        """True if dead letters wait to be sent."""
        return bool(self._ready)

    @property
    def is_deleting(self) -> bool:
        """True while rows are being deleted, or about to be."""
        return bool(self._arrived or self._refused or self._deleting.is_running)

    def due_in(self) -> float:
        """Return the seconds until a step can be started, if nothing else happens."""
        waits = self._not_before - now()
        return waits if waits > 0 else _READY_SECONDS if self._ready else float("inf")

    def advance(self, holds: HoldSet) -> None:
        """Start every step that can be started."""
        self._collect_fetched()
        self.finish()
        if not holds.requests:
            self._outage.forget()
        elif not self.is_busy and now() >= self._not_before:
            ids = self._next_ids(holds.requests, BATCH)
            if ids:
                fetch = self._fetch(ids, holds.requests)
                self._fetching.start(lambda store: (ids, fetch(store)))

    def finish(self) -> None:
        """Delete the rows of letters that have arrived, and start no other step."""
        self._collect_deleted()
        is_settled = not self._sent and (self._arrived or self._refused)
        if is_settled and not self._deleting.is_running and now() >= self._not_before:
            self._deleting.start(self._delete())

    def take_due(self) -> list[StoredRecord]:
        """Return dead letters to send now, each alone."""
        letters = list(self._ready)
        self._ready.clear()
        self._sent.update((letter.id, letter) for letter in letters)
        return letters

    def put_back(self, letters: Iterable[StoredRecord]) -> None:
        """Take back dead letters that could not be sent."""
        for letter in letters:
            del self._sent[letter.id]
            self._ready.append(letter)

    def delivered(self, records: list[StoredRecord]) -> list[StoredRecord]:
        """Take the dead letters out of delivered records; return the rest."""
        letters = [record for record in records if self._sent.get(record.id) is record]
        if not letters:
            return records
        self._outage.recovered()
        for letter in letters:
            del self._sent[letter.id]
        self._arrived += letters
        self._ctx.metrics.dead_letters(len(letters))
        mine = {id(letter) for letter in letters}
        return [record for record in records if id(record) not in mine]

    def failed(self, failures: list[Failure]) -> list[Failure]:
        """Take the dead letters out of failed records; return the rest."""
        mine = [failure for failure in failures if self._sent.get(failure.record.id) is failure.record]
        for failure in mine:
            del self._sent[failure.record.id]
            if failure.kind in (ErrorKind.POISON, ErrorKind.UNAUTHORIZED):
                self._refused.append(failure)
            else:
                self._topic_exists = self._topic_exists and failure.kind is not ErrorKind.UNKNOWN_TOPIC
                self._back_off(failure.error.str())
        taken = {id(failure) for failure in mine}
        return [failure for failure in failures if id(failure) not in taken]

    def _collect_fetched(self) -> None:
        if not self._fetching.is_done:
            return
        try:
            ids, letters = self._fetching.result()
        except StoreUnavailable:
            self._not_before = self._fetching.retry_at
        except OutboxError as error:
            self._back_off(str(error))
        else:
            self._topic_exists = True
            self._done.update(ids)  # those whose rows are gone, too
            self._ready.extend(letters)

    def _back_off(self, why: str) -> None:
        self._outage.failed(why)
        self._not_before = now() + RETRY_SECONDS
        self._done.clear()

    def _delete(self) -> Callable[[OutboxStore], None]:
        arrived = list(self._arrived)
        reasons = {failure.record.id: self._refusal(failure.error) for failure in self._refused}

        def delete(store: OutboxStore) -> None:
            try:
                if arrived:
                    store.holds.delete_dead_lettered(
                        [letter.id for letter in arrived], [letter.create_time for letter in arrived]
                    )
            except RowsRemain as error:  # marks go on all the same: only dead letters wait
                raise StoreUnavailable(str(error)) from error
            for reason in set(reasons.values()):
                ids = [identity for identity, why in reasons.items() if why == reason]
                store.holds.refuse_dead_letters(ids, reason)

        return delete

    def _collect_deleted(self) -> None:
        if not self._deleting.is_done:
            return
        try:
            self._deleting.result()
        except StoreUnavailable:
            self._not_before = self._deleting.retry_at
            return
        for failure in self._refused:
            _log.warning("record %d stays held: %s", failure.record.id, self._refusal(failure.error))
        self._arrived, self._refused = [], []
