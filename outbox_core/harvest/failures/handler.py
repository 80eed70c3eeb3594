"""The common part of failed deliveries and failed transactions: holds, backoffs with their log, and dead letters.

A harvester with `on_poison: dead-letter`, or an operator with `outbox hold dead-letter`, requests a record as a dead
letter by its hold. **A dead letter is an ordinary record whose topic is rewritten when it is read.** Its row and its
hold are deleted together, once it has arrived; until then the hold stands, so no record of its key moves. One that the
dead-letter topic refuses stays held, with the error: no row is ever deleted that is not in Kafka.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from outbox_core.election.lease import now
from outbox_core.errors import OutboxError
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.backoff_report import BackoffReport, name, the_first
from outbox_core.harvest.failures.backoffs import LONGEST_BACKOFF_SECONDS, Backoffs
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.harvest.failures.policy import destination_of, new_hold
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import ErrorKind
from outbox_core.kafka.messages import DeadLetter, Failure, dead_letter
from outbox_core.kafka.refusals import size_limits, why_no_dead_letter
from outbox_core.stores.interface import (
    NO_HOLDS,
    HoldSet,
    LaneKey,
    LaneOrRow,
    NewHold,
    OutboxStore,
    RowId,
    StoredRecord,
    row_id,
)

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_FACTOR = 20
_MOST_DEAD_LETTERS = 50  # at once: values may be large


class Exclusion(NamedTuple):
    """Keys, rows, and topics that a mark or scan leaves out beside those that are held."""

    lanes: set[LaneKey]
    rows: set[RowId]
    topics: frozenset[str]

    @classmethod
    def of(cls, items: Collection[LaneOrRow], topics: frozenset[str]) -> Exclusion:
        """Return the exclusion of keys, and rows without one, and of topics."""
        keys = {item for item in items if not isinstance(item, RowId)}
        rows = {item for item in items if isinstance(item, RowId)}
        return cls(keys, rows, topics)


class Letters(NamedTuple):
    """Dead letters that were read, and the problem with their topic, if there is one."""

    records: list[DeadLetter]
    problem: KafkaError | None = None


NO_LETTERS = Letters([])


def split_letters(records: Sequence[StoredRecord]) -> tuple[Sequence[StoredRecord], Sequence[StoredRecord]]:
    """Return ordinary records, and dead letters."""
    if DeadLetter not in set(map(type, records)):
        return records, []
    letters = [record for record in records if isinstance(record, DeadLetter)]
    return [record for record in records if not isinstance(record, DeadLetter)], letters


class FailureHandler:
    """Holds, backoffs and dead letters of one leadership. The marker's thread uses `hold_cache`; `holds` are frozen."""

    def __init__(self, ctx: HarvestContext) -> None:
        backoff = ctx.limits.io_error_backoff
        self.hold_cache = HoldCache(ctx.metrics)
        self.holds: HoldSet = NO_HOLDS
        longest = max(backoff, min(backoff * _LONGEST_BACKOFF_FACTOR, LONGEST_BACKOFF_SECONDS))
        self.backoffs = Backoffs(backoff / 10, longest, now)
        self._report = BackoffReport(ctx.metrics, self.backoffs)
        self._has_letter_topic = False
        self._ctx = ctx

    def end(self) -> None:
        """Reset the gauges: later leaderships read the records from the table again."""
        self._report.end()

    # -- failures

    def _succeeded(self, records: Sequence[StoredRecord]) -> None:
        ended = self.backoffs.succeeded(records) if self.backoffs else []
        if ended:
            _log.info("records for %s arrive again", the_first(ended, name))

    def _back_off(self, failure: Failure) -> bool:
        """Back off the destination of a failure; return True if it did not wait before."""
        record, error = failure.record, failure.error.str()
        destination, unreachable = destination_of(failure), failure.kind is ErrorKind.TRANSIENT
        is_new = self.backoffs.failed(record, destination, unreachable=unreachable, why=error)
        what = f"record {record.id} for topic {record.topic}"
        if unreachable:
            self._ctx.kafka.failed(error, at=what)
        elif is_new:
            what = f"topic {record.topic}" if destination[1] is None else what
            _log.warning("%s: %s; it is tried again after a growing backoff", what, error)
        if isinstance(record, DeadLetter) and failure.kind is ErrorKind.UNKNOWN_TOPIC:
            self._has_letter_topic = False
        return is_new

    def _holding(self, failures: Sequence[Failure]) -> Callable[[OutboxStore], HoldSet]:
        """Return what holds the records of failures, or their topics, and leaves dead letters held; it returns all."""
        ctx, cache = self._ctx, self.hold_cache
        refused: dict[str, set[int]] = {}
        holds: dict[tuple[str, int | None], NewHold] = {}
        for failure in failures:
            record = failure.record
            if isinstance(record, DeadLetter):
                why = why_no_dead_letter(failure.error, ctx.grant_write, ctx.limits.max_message_bytes)
                # Without the right to write to their topic, all others would fail, too, each batch with its term.
                others = self.holds.requests if failure.kind is ErrorKind.UNAUTHORIZED else ()
                refused.setdefault(why, set()).update((record.id, *others))
            else:
                limits = size_limits(ctx.batches.limit_of(record.topic), ctx.limits.max_message_bytes)
                hold = new_hold(failure, ctx.grant_write, dead_letter=ctx.dead_letters.on_poison, limits=limits)
                holds[hold.topic, hold.record_id] = hold

        return lambda store: cache.write(store, list(holds.values()), refused)

    # -- dead letters

    def _letters_to_read(self, but: Collection[int], most: int = _MOST_DEAD_LETTERS) -> list[int]:
        """Return ids of requested dead letters to send next, but for given ones."""
        requests = self.holds.requests
        if not requests or self._ctx.dead_letters.topic in self.backoffs.topics:
            return []
        return sorted(requests.keys() - but)[: min(_MOST_DEAD_LETTERS, most)]

    def read_letters(self, store: OutboxStore, ids: Collection[int], holds: HoldSet) -> Letters:
        """Read requested dead letters, and make their topic if need be. On the marker's thread."""
        topic, requests = self._ctx.dead_letters, holds.requests
        wanted = [identity for identity in ids if identity in requests]
        if not wanted:
            return NO_LETTERS
        letters = [dead_letter(row, topic.topic, requests[row.id]) for row in store.holds.fetch(wanted)]
        if letters and not self._has_letter_topic:
            try:
                topic.ensure()
            except OutboxError as error:
                return Letters(letters, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, str(error)))
            self._has_letter_topic = True
        return Letters(letters)

    def sendable(self, letters: Letters) -> list[DeadLetter]:
        """Return dead letters that may be published; back off their topic if it could not be made."""
        if letters.problem is None:
            return letters.records
        self._back_off(Failure(letters.records[0], letters.problem, partition=-1))
        return []

    def _end_gone(self, rows: Iterable[RowId], found: Sequence[StoredRecord], tried: Sequence[StoredRecord]) -> None:
        """End the backoffs of rows that are gone, held, or not `tried`: what is behind those found may not have fit."""
        last = max((record.id for record in found), default=float("inf"))
        for row in set(rows).difference(map(row_id, tried)):
            if row.id <= last:
                self.backoffs.end(row)
