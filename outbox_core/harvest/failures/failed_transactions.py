"""Failed transactions and holds of exactly-once delivery, on the harvest thread.

Failures stay in the table. No record is kept here after its transaction, only what the next scan needs: a limit
(`batch_limit`), the destinations that are backed off (`backoffs`), and the holds. So a failed record is followed
through `policy`, which decides; this module and its base, which carry that out; and those two. What may be to blame is
tried in smaller transactions, from the head of the table. A record that ended the producer, alone, has its topic backed
off; the third time the topic is held.

**Dead letters are ordinary records whose topic is rewritten by the scan**: rows that are requested by their holds are
read with the others, and published in the same transactions. One that the dead-letter topic refuses stays held, with
the error.

Others must not wait for that. A topic of which a record was just found to be bad rests for three times as long as that
took, and so does everything that is tried again; an empty table ends the rests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from outbox_core.election.lease import now
from outbox_core.errors import TrackingTopicError
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.backoffs import MOST_ENDS
from outbox_core.harvest.failures.batch_limit import BatchLimit
from outbox_core.harvest.failures.handler import Exclusion, FailureHandler, Letters
from outbox_core.harvest.failures.policy import Decision, decide
from outbox_core.harvest.store_calls import LeadershipWait
from outbox_core.kafka.errors import MAYBE_DELIVERED, ErrorKind, kind_of
from outbox_core.kafka.messages import DeadLetter, Failure
from outbox_core.kafka.record_producer import Reports
from outbox_core.kafka.transactions import Aborted, Ended
from outbox_core.stores.interface import (
    HoldSet,
    LaneOrRow,
    NewHold,
    OutboxStore,
    RowId,
    RowQuery,
    StoredRecord,
    lane_or_row,
    row_id,
)

_log = logging.getLogger(__name__)

_REST_FACTOR = 3  # the search, and what is tried again, take at most a quarter of the time
_LONGEST_REST_SECONDS = 5.0
_MOST_TRIED_AGAIN = 10
_FEW = 500


class FailedTransactions(FailureHandler):
    """Failed transactions of one leadership."""

    def __init__(self, ctx: HarvestContext, wait: LeadershipWait, tracking_topic: str) -> None:
        super().__init__(ctx)
        self.batch = BatchLimit(ctx.limits.mark_query_records, ctx.limits.most_in_transaction)
        self._wait = wait
        self._tracking_topic = tracking_topic
        self._rests: dict[str, float] = {}  # topic -> until when
        self._try_again_at = 0.0

    # -- scans

    def exclusion(self) -> Exclusion:
        """Return the exclusion of a scan that starts now."""
        if self._rests:
            self._rests = {topic: until for topic, until in self._rests.items() if now() < until}
        return Exclusion.of(self.backoffs.waiting, self.backoffs.topics | self._rests.keys())

    def due_in(self) -> float:
        """Return the seconds until the holds must be read, or a destination tried again."""
        due = self.hold_cache.due_in() if self.holds else float("inf")
        return max(0.0, min(due, max(self.backoffs.next_due(), self._try_again_at) - now()))

    def found_none(self) -> None:
        """Note that a scan found no rows: nothing need wait for others."""
        self._try_again_at = 0.0
        if self._rests:
            self._rests.clear()
            self._ctx.commits.notify()

    def read_holds(self) -> None:
        """Read the holds."""
        self._take_in_holds(self.hold_cache.read)

    def read_holds_if_stale(self) -> None:
        """Read stale holds, while the table returns no new rows: one may have been released."""
        before = self.holds
        if before and not self.hold_cache.due_in():
            self.read_holds()
            if self.holds is not before:
                self._ctx.commits.notify()

    def admissible(self, records: Sequence[StoredRecord], holds: HoldSet) -> list[StoredRecord]:
        """Return those of a scan's records that may be published."""
        if holds.requests and holds is not self.holds:
            self._ctx.commits.notify()
        self.holds = holds
        kept = [record for record in records if not holds.covers(record)] if holds else list(records)
        if len(kept) < len(records):
            self._ctx.watermark.went_back(filter(holds.covers, records))
        return kept

    @property
    def is_busy(self) -> bool:
        """True while rows wait for a destination, or for the dead-letter topic."""
        return bool(self.backoffs or self._rests or self.holds.requests)

    # -- rows that are read by their ids

    def letters_to_read(self, in_flight: Iterable[StoredRecord | RowId]) -> list[int]:
        """Return ids of requested dead letters for the next transaction."""
        if not self.holds.requests or self._ctx.dead_letters.topic in self._rests:
            return []
        return self._letters_to_read({row.id for row in in_flight}, max(1, self.batch.limit // 2))

    def rows_to_try(self) -> list[RowId]:
        """Return rows by which destinations are to be tried again now, in a transaction of their own."""
        self._report.update()
        if not self.backoffs or now() < self._try_again_at:
            return []
        return self.backoffs.due_together(min(_MOST_TRIED_AGAIN, self.batch.limit))

    def read_again(self, rows: Sequence[RowId]) -> list[StoredRecord]:
        """Read such rows; the backoff of one that is gone, is held, or has another topic or key by now, ends.

        Only what scans leave out is tried: another record may be in a scan that is under way, and would be twice.
        """
        hold_cache, holds, ids = self.hold_cache, self.holds, [row.id for row in rows]
        query = RowQuery(len(rows), self._ctx.limits.mark_query_bytes, holds=holds, only_rows=rows)

        def read(store: OutboxStore) -> tuple[Sequence[StoredRecord], Letters, HoldSet]:
            found = store.scan(query)
            current = hold_cache.current_or_reread(store, found)
            return found, self.read_letters(store, ids, current), current

        answer = self._wait.retry_until_done(self._ctx.marker, read)
        if answer is None:
            return []
        found, letters, self.holds = answer
        waiting = [record for record in found if not self.holds.covers(record) and self.backoffs.covers(record)]
        waiting_letters = [letter for letter in letters.records if self.backoffs.covers(letter)]
        self._end_gone(rows, found, [*waiting, *waiting_letters])
        waiting += self.sendable(letters._replace(records=waiting_letters)) if waiting_letters else []
        return sorted(waiting, key=attrgetter("id"))

    # -- the ends of transactions

    def committed(self, records: list[StoredRecord], took: float) -> None:
        """Note published records, and the seconds that their transaction took."""
        self.batch.committed(len(records), took)
        self._succeeded(records)
        self.backoffs.committed()
        self._ctx.kafka.succeeded(all_of_it=not self.backoffs.is_unreachable)

    def aborted(
        self,
        aborted: Aborted,
        records: Sequence[StoredRecord],
        reports: Reports,
        took: float,
        *,
        is_retry: bool = False,
    ) -> None:
        """Decide on a transaction that had to be aborted; nothing of it is in Kafka.

        With `is_retry` it was of rows that are tried again, each of another topic, so each has a report of its own.
        """
        if is_retry:
            self._try_again_at = now() + _REST_FACTOR * took
        if aborted.error is None:
            return
        places = {(failure.record.topic, failure.partition) for failure in reports.failures}
        # Too much for the time, or for a quota; but what is away fails in small ones, too, which tell of few keys.
        is_too_much = not places or len(records) > _FEW or not places.isdisjoint(reports.reached)
        if is_too_much and not is_retry and aborted.error.code() in MAYBE_DELIVERED:
            self.batch.failed(len(records), refused=False)
        if not (aborted.record_at_fault or reports.failures):
            self._ctx.kafka.failed(aborted.error.str())
            self._wait.back_off(self._ctx.limits.io_error_backoff)
            return
        self._succeeded(reports.arrived)
        failures = reports.failures
        is_alone = len(records) == 1 or (is_retry and bool(failures))
        if not failures and (is_alone or is_retry):
            arrived = reports.arrived if is_retry else ()
            failures = [Failure(each, aborted.error, partition=-1) for each in records if each not in arrived]
        if is_alone:
            failures = [failure._replace(alone=True) for failure in failures]
        if self._decide(failures, records, took) or (is_retry and not failures):
            return
        refused = [each.error for each in failures if each.kind is ErrorKind.POISON] or [aborted.error]
        self.batch.failed(len(records), refused=kind_of(refused[0]) is ErrorKind.POISON)

    def _decide(self, failures: Sequence[Failure], records: Sequence[StoredRecord], took: float) -> bool:
        """Carry out the policy's decisions; return False if a smaller transaction must show which record it is."""
        bad: list[Failure] = []
        denied: list[Failure] = []
        others: list[Failure] = []
        is_unknown = not failures
        for failure in failures:
            match decide(failure, alone=failure.alone, can_hold=True):
                case Decision.RETRY:
                    is_unknown = True
                case Decision.HOLD:
                    (denied if failure.kind is ErrorKind.UNAUTHORIZED else bad).append(failure)
                case _:
                    others.append(failure)
        if bad:  # what failed beside them failed because of them, or fails again
            self._refuse_first(bad, records, took)
            return True
        if is_unknown:
            return False
        held = self._hold_denied(denied) if denied else ()
        others += [failure for failure in denied if failure.record.topic not in held]
        first = _first_of_keys(records) if others else {}
        for failure in others:
            # A destination is tried again by a row that no other of its key precedes.
            self._back_off(failure._replace(record=first.get(lane_or_row(failure.record), failure.record)))
        return True

    def _refuse_first(self, bad: Sequence[Failure], records: Sequence[StoredRecord], took: float) -> None:
        """Hold bad records; but a hold keeps back earlier ones of its key, too, so those are published first."""
        first = _first_of_keys(records)
        ready = [failure for failure in bad if first.get(lane_or_row(failure.record), failure.record) is failure.record]
        if not ready:
            at = min(failure.record.id for failure in bad)
            self.batch.cut(sum(record.id < at for record in records))
            return
        self.refused(ready)
        until = now() + min(_REST_FACTOR * took, _LONGEST_REST_SECONDS)
        self._rests.update((failure.record.topic, until) for failure in ready)

    def ended(self, ended: Ended, records: Sequence[StoredRecord]) -> None:
        """Decide on a transaction of these records that ended the producer."""
        if not records:
            return
        cause = ended.cause
        failures = [] if cause is None else [Failure(record, cause, alone=True) for record in records]
        if failures and failures[0].kind is ErrorKind.UNAUTHORIZED and self._hold_denied(failures):
            return
        self.batch.ended(len(records))
        record, topics = records[0], {record.topic for record in records}
        if len(topics) > 1 or (self.batch.ends < MOST_ENDS and not self.backoffs.is_suspect(record.topic)):
            return
        ends = self.backoffs.suspect(record, ended.reason)
        if ends < MOST_ENDS or isinstance(record, DeadLetter):
            return
        if not self.hold_cache.is_writable:
            what = "records for topic %s end every term (%s); without a table of holds it cannot be held"
            _log.error(what, record.topic, ended.reason)
            return
        what = "topic %s is held: records for it, and for no other topic, end every term: %s"
        _log.error(what, record.topic, ended.reason)
        hold, hold_cache = NewHold(record.topic, None, None, "ends the producer", ended.reason), self.hold_cache
        self._take_in_holds(lambda store: hold_cache.write(store, [hold]))
        self.backoffs.end(row_id(record))

    # -- holds

    def refused(self, failures: Sequence[Failure]) -> None:
        """Hold records that failed alone, or that the client refused, before the next scan."""
        if not failures:
            return
        self._ctx.metrics.publish_error(len(failures))
        to_hold = []
        for failure in failures:
            decision = decide(failure, alone=True, can_hold=self.hold_cache.is_writable)
            if decision is Decision.HOLD and failure.kind is ErrorKind.POISON:
                to_hold.append(failure)
            else:
                self._back_off(failure)
        self._hold(to_hold)

    def _hold_denied(self, failures: Sequence[Failure]) -> set[str]:
        """Hold the topics that we may not write to, as the cluster confirms: none is held on suspicion; return them.

        A transaction that fails for a missing right does not always name the topic, which may be the tracking topic.
        """
        topics = {failure.record.topic for failure in failures}
        denied = self._ctx.dead_letters.forbidden({*topics, self._tracking_topic})
        if self._tracking_topic in denied:
            raise TrackingTopicError(
                f"cannot write to tracking topic {self._tracking_topic!r}, as exactly-once delivery does in every "
                f"transaction; {self._ctx.grant_write}"
            )
        denied &= topics if self.hold_cache.is_writable else {self._ctx.dead_letters.topic}
        self._hold([failure for failure in failures if failure.record.topic in denied])
        return denied

    def _hold(self, failures: Sequence[Failure]) -> None:
        """Hold the records of these failures, or their topics."""
        for failure in failures:  # else they would wait, long after the release
            self.backoffs.end(row_id(failure.record))
        if failures:
            self._take_in_holds(self._holding(failures))

    def _take_in_holds(self, read_or_write: Callable[[OutboxStore], HoldSet]) -> None:
        holds = self._wait.retry_until_done(self._ctx.marker, read_or_write)
        if holds is not None:  # else the leadership is over
            self.holds = holds


def _first_of_keys(records: Sequence[StoredRecord]) -> dict[LaneOrRow, StoredRecord]:
    return {lane_or_row(record): record for record in reversed(records)}
