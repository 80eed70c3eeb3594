"""Failed transactions and holds of exactly-once delivery, on the harvest thread.

Failures stay in the table. No record is kept here after its transaction, only what the next scan needs: a limit
(`batch_limit`), the destinations that are backed off (`backoffs`), and the holds. So a failed record is followed
through `policy`, which decides; this module, which carries that out; and those two.

    its transaction failed, and it may be to blame --> a smaller limit, the scan begins at the head again
    it failed alone, or the client refused it -------> held with its key, or a dead letter
    we may not write to its topic -------------------> the topic is held
    its destination does not answer, or is missing --> backed off, and tried again by one record
    it ended the producer, alone --------------------> its topic is backed off; the third time it is held

**Dead letters are ordinary records whose topic is rewritten by the scan**: rows that are requested by their holds are
read with the others, and published in the same transactions. One that the dead-letter topic refuses stays held, with
the error.

Others must not wait for that. A topic of which a record was just found to be bad rests for three times as long as that
took, and so does everything that is tried again; an empty table ends the rests.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

from outbox_core.election.lease import now
from outbox_core.errors import OutboxError, TrackingTopicError
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.backoffs import Backoffs
from outbox_core.harvest.failures.batch_limit import BatchLimit
from outbox_core.harvest.failures.handler import Exclusion, FailureHandler, longest_backoff_of
from outbox_core.harvest.failures.policy import Backoff, Hold, Retry, decide, new_hold, why_no_dead_letter
from outbox_core.harvest.failures.released_keys import LaneOrRow, lane_or_row
from outbox_core.harvest.store_calls import LeadershipWait
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import ErrorKind, kind_of
from outbox_core.kafka.messages import DeadLetter, Failure, dead_letter
from outbox_core.kafka.record_producer import Reports
from outbox_core.kafka.transactions import Aborted, Ended
from outbox_core.stores.interface import HoldSet, NewHold, OutboxStore, RowId, StoredRecord, row_id

_log = logging.getLogger(__name__)

_REST_FACTOR = 3  # the search, and what is tried again, take at most a quarter of the time
_LONGEST_REST_SECONDS = 5.0
_MOST_TRIED_AGAIN = 10
_MOST_DEAD_LETTERS = 50  # at once: values may be large
_MOST_ENDS = 3


class Letters(NamedTuple):
    """Dead letters that were read, and the problem with their topic, if there is one."""

    records: list[DeadLetter]
    problem: KafkaError | None = None


class FailedTransactions(FailureHandler):
    """Failed transactions of one leadership."""

    backoffs: Backoffs

    def __init__(self, ctx: HarvestContext, wait: LeadershipWait, tracking_topic: str) -> None:
        limits = ctx.limits
        super().__init__(ctx, Backoffs(limits.io_error_backoff / 10, longest_backoff_of(limits), now))
        self.batch = BatchLimit(limits.mark_query_records)
        self._wait = wait
        self._tracking_topic = tracking_topic
        self._rests: dict[str, float] = {}  # topic -> until when
        self._try_again_at = 0.0
        self._has_letter_topic = False

    # -- scans

    def exclusion(self) -> Exclusion:
        """Return the exclusion of a scan that starts now."""
        if self._rests:
            self._rests = {topic: until for topic, until in self._rests.items() if now() < until}
        backoffs = self.backoffs
        return Exclusion(backoffs.lanes, backoffs.rows, backoffs.topics | self._rests.keys())

    def due_in(self) -> float:
        """Return the seconds until the holds must be read, or a destination tried again."""
        due = self.hold_cache.due_in() if self.holds else float("inf")
        next_due = self.backoffs.next_due
        return due if next_due is None else max(0.0, min(due, max(next_due, self._try_again_at) - now()))

    def found_none(self) -> None:
        """Note that a scan found no rows: nothing need wait for others."""
        self._try_again_at = 0.0
        if self._rests:
            self._rests.clear()
            self._ctx.commits.notify()

    def read_holds(self) -> bool:
        """Read the holds; return False if the leadership ended first."""
        read = self._wait.retry_until_done(self._ctx.marker, self.hold_cache.read)
        self.holds = self.hold_cache.current
        return read is not None

    def read_holds_if_stale(self) -> None:
        """Read stale holds, while the table returns no new rows: one may have been released."""
        if self.holds and self.hold_cache.is_stale:
            before = self.holds
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
            self._ctx.watermark.reset("records that were read are held")
        return kept

    @property
    def is_busy(self) -> bool:
        """True while rows wait for a destination, or for the dead-letter topic."""
        return bool(self.backoffs or self._rests or self.holds.requests)

    # -- rows that are read by their ids

    def letters_to_read(self, in_flight: Collection[tuple[int, int]]) -> list[int]:
        """Return ids of requested dead letters for the next transaction."""
        topic, requests = self._ctx.dead_letters.topic, self.holds.requests
        if not requests or topic in self.backoffs.topics or topic in self._rests:
            return []
        under_way = {row[0] for row in in_flight}
        return sorted(requests.keys() - under_way)[: min(_MOST_DEAD_LETTERS, max(1, self.batch.limit // 2))]

    def read_letters(self, store: OutboxStore, ids: Collection[int], holds: HoldSet) -> Letters:
        """Read requested dead letters, and make their topic if need be. On the marker's thread."""
        topic, requests = self._ctx.dead_letters, holds.requests
        wanted = [identity for identity in ids if identity in requests]
        letters = (
            [dead_letter(row, topic.topic, requests[row.id]) for row in store.holds.fetch(wanted)] if wanted else []
        )
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

    def rows_to_try(self) -> list[RowId]:
        """Return rows by which destinations are to be tried again now, in a transaction of their own."""
        self._report.update()
        if not self.backoffs or now() < self._try_again_at:
            return []
        return self.backoffs.due(min(_MOST_TRIED_AGAIN, self.batch.limit))

    def read_again(self, rows: Sequence[RowId]) -> list[StoredRecord]:
        """Read such rows; the backoff of one that is gone, or is held, ends."""
        hold_cache, ids = self.hold_cache, [row.id for row in rows]

        def read(store: OutboxStore) -> tuple[Sequence[StoredRecord], Letters, HoldSet]:
            found = store.find(ids)
            holds = hold_cache.current_or_reread(store, found)
            return found, self.read_letters(store, ids, holds), holds

        answer = self._wait.retry_until_done(self._ctx.marker, read)
        if answer is None:
            return []
        found, letters, self.holds = answer
        records = [record for record in found if not self.holds.covers(record)]
        for row in set(rows).difference(map(row_id, [*records, *letters.records])):
            self.backoffs.end(row)
        records += self.sendable(letters)
        return sorted((record for record in records if row_id(record) in rows), key=attrgetter("id"))

    # -- the ends of transactions

    def committed(self, records: list[StoredRecord]) -> None:
        """Note published records."""
        self.batch.committed()
        self._succeeded(records)
        self.backoffs.committed()
        self._ctx.kafka.succeeded(all_of_it=not self.backoffs.is_unreachable)

    def tried_again(self, records: Sequence[StoredRecord], aborted: Aborted, reports: Reports, took: float) -> None:
        """Decide on destinations that were tried again, in a transaction that failed or did not arrive in time."""
        self._try_again_at = now() + _REST_FACTOR * took
        if aborted.error is None or not (aborted.record_at_fault or reports.failures):
            self._note_failed_cluster(aborted)
            return
        self._succeeded(reports.arrived)
        failures = [failure._replace(alone=True) for failure in reports.failures]
        if not failures:
            arrived, alone = set(map(row_id, reports.arrived)), len(records) == 1
            late = [record for record in records if row_id(record) not in arrived]
            failures = [Failure(record, aborted.error, alone=alone, partition=-1) for record in late]
        self._decide(failures, records, took)

    def aborted(self, aborted: Aborted, records: Sequence[StoredRecord], reports: Reports, took: float) -> None:
        """Decide on a transaction that had to be aborted; nothing of it is in Kafka."""
        failures = reports.failures
        if aborted.error is None or not (aborted.record_at_fault or failures):
            self._note_failed_cluster(aborted)
            return
        if not failures and len(records) == 1:
            failures = [Failure(records[0], aborted.error, partition=-1)]
        if len(records) == 1:
            failures = [failure._replace(alone=True) for failure in failures]
        if not self._decide(failures, records, took):
            refused = [each.error for each in failures if each.kind is ErrorKind.POISON] or [aborted.error]
            self.batch.failed(len(records), refused=kind_of(refused[0]) is ErrorKind.POISON)

    def _note_failed_cluster(self, aborted: Aborted) -> None:
        if aborted.error is not None:
            self._ctx.kafka.failed(aborted.error.str())
            self._wait.back_off(self._ctx.limits.io_error_backoff)

    def _decide(self, failures: Sequence[Failure], records: Sequence[StoredRecord], took: float) -> bool:
        """Carry out the policy's decisions; return False if a smaller transaction must show which record it is."""
        bad: list[Failure] = []
        denied: list[Failure] = []
        others: list[Failure] = []
        is_unknown = not failures
        for failure in failures:
            match decide(failure, alone=failure.alone, can_hold=True):
                case Retry():
                    is_unknown = True
                case Hold() if failure.kind is ErrorKind.UNAUTHORIZED:
                    denied.append(failure)
                case Hold() | Backoff(None):
                    bad.append(failure)
                case _:
                    others.append(failure)
        if bad:  # what failed beside them failed because of them, or fails again
            self._refuse_first(bad, records, took)
            return True
        if is_unknown:
            return False
        self._hold_or_back_off_topics(denied)
        first = _first_of_keys(records) if others else {}
        for failure in others:
            # A destination is tried again by a row that no other of its key precedes.
            self._back_off(failure._replace(record=first.get(lane_or_row(failure.record), failure.record)))
            self._has_letter_topic = self._has_letter_topic and not _is_missing_letter_topic(failure)
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
        if not records or self._hold_denied_cause(ended.cause, records):
            return
        self.batch.ended(len(records))
        record, topics = records[0], {record.topic for record in records}
        if len(topics) > 1 or (self.batch.ends < _MOST_ENDS and not self.backoffs.is_suspect(record.topic)):
            return
        ends = self.backoffs.suspect(record, ended.reason)
        if ends < _MOST_ENDS or isinstance(record, DeadLetter):
            return
        if not self.hold_cache.is_writable:
            what = "records for topic %s end every term (%s); without a table of holds it cannot be held"
            _log.error(what, record.topic, ended.reason)
            return
        what = "topic %s is held: records for it, and for no other topic, end every term: %s"
        _log.error(what, record.topic, ended.reason)
        self._write([NewHold(record.topic, None, None, "ends the producer", ended.reason)])
        self.backoffs.end(row_id(record))

    # -- holds

    def refused(self, failures: Sequence[Failure]) -> None:
        """Hold records that failed alone, or that the client refused, before the next scan."""
        if not failures:
            return
        self._ctx.metrics.publish_error(len(failures))
        holds = []
        for failure in failures:
            if failure.kind is not ErrorKind.POISON:
                self._back_off(failure)
            elif isinstance(failure.record, DeadLetter):
                self._keep([failure.record], failure.error)
            elif decide(failure, alone=True, can_hold=self.hold_cache.is_writable) == Backoff(None):
                self._back_off_alone(failure)
            else:
                self.backoffs.end(row_id(failure.record))
                holds.append(self._new_hold(failure))
        if holds:
            self._write(holds)

    def _hold_denied_cause(self, cause: KafkaError | None, records: Sequence[StoredRecord]) -> bool:
        """Hold the topics we may not write to, if that ended the producer; return False if it was something else."""
        if cause is None or kind_of(cause) is not ErrorKind.UNAUTHORIZED:
            return False
        return bool(self._hold_denied([Failure(record, cause, alone=True) for record in records]))

    def _hold_or_back_off_topics(self, denied: Sequence[Failure]) -> None:
        done = self._hold_denied(denied) if denied else set[str]()
        for failure in denied:
            if failure.record.topic in done:  # else it would wait, long after the release
                self.backoffs.end(row_id(failure.record))
            else:
                done.add(failure.record.topic)
                self._back_off(failure)

    def _hold_denied(self, failures: Sequence[Failure]) -> set[str]:
        """Hold the topics that we may not write to, as the cluster confirms: none is held on suspicion; return them.

        A transaction that fails for a missing right does not always name the topic, which may be the tracking topic.
        """
        by_topic: dict[str, Failure] = {}
        for failure in failures:
            by_topic.setdefault(failure.record.topic, failure)
        denied = self._ctx.dead_letters.forbidden({*by_topic, self._tracking_topic})
        if self._tracking_topic in denied:
            raise TrackingTopicError(
                f"cannot write to tracking topic {self._tracking_topic!r}, as exactly-once delivery does in every "
                f"transaction; {self._ctx.grant_write}"
            )
        denied &= by_topic.keys()
        letters = self._ctx.dead_letters.topic
        if letters in denied:
            self._keep(
                [each.record for each in failures if isinstance(each.record, DeadLetter)], by_topic[letters].error
            )
        topics = sorted(denied - {letters}) if self.hold_cache.is_writable else []
        if topics:
            self._write([new_hold(by_topic[topic], self._ctx.grant_write, dead_letter=False) for topic in topics])
        return denied if self.hold_cache.is_writable else denied & {letters}

    def _keep(self, letters: Sequence[StoredRecord], error: KafkaError) -> None:
        """Leave dead letters that their topic refused held, with the error."""
        ids = [letter.id for letter in letters]
        why = why_no_dead_letter(error, self._ctx.grant_write, self._ctx.limits.max_message_bytes)
        for letter in letters:
            _log.warning("record %d stays held: %s", letter.id, why)
            self.backoffs.end(row_id(letter))
        self._wait.retry_until_done(self._ctx.marker, lambda store: store.holds.refuse_dead_letters(ids, why))
        self.read_holds()

    def _write(self, holds: Sequence[NewHold]) -> None:
        hold_cache = self.hold_cache
        written = self._wait.retry_until_done(self._ctx.marker, lambda store: hold_cache.write(store, holds))
        if written is not None:
            self.holds = written


def _first_of_keys(records: Sequence[StoredRecord]) -> dict[LaneOrRow, StoredRecord]:
    return {lane_or_row(record): record for record in reversed(records)}


def _is_missing_letter_topic(failure: Failure) -> bool:
    return isinstance(failure.record, DeadLetter) and failure.kind is ErrorKind.UNKNOWN_TOPIC
