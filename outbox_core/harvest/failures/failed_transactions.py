"""Failed transactions and holds of exactly-once delivery, on the harvest thread.

`bisection` finds the record that made a transaction fail, `policy` decides on it. Holds are written before their keys
are scanned again: until then scans leave the key out, and its records in the result of a scan under way are thrown
away. Groups and probes take a bounded share of the time while there is ordinary work, and precede it only when too many
records are in memory.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from outbox_core.election.lease import now
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.backoffs import Backoffs
from outbox_core.harvest.failures.bisection import Bisection, Group
from outbox_core.harvest.failures.denied_topics import DeniedTopics
from outbox_core.harvest.failures.handler import Exclusion, FailureHandler, longest_backoff_of
from outbox_core.harvest.failures.policy import Backoff, Hold, Retry, decide, new_hold
from outbox_core.harvest.failures.released_keys import LaneOrRow, lane_or_row
from outbox_core.harvest.store_calls import LeadershipWait
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import ErrorKind, kind_of
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.transactions import Aborted
from outbox_core.stores.interface import HoldSet, NewHold, StoredRecord, row_id

_log = logging.getLogger(__name__)

# Everything else waits while a probe is tried: not long, and not often.
_PROBE_PATIENCE_SECONDS = 1.0


class FailedTransactions(FailureHandler):
    """Failed transactions of one term."""

    def __init__(self, ctx: HarvestContext, wait: LeadershipWait, denied: DeniedTopics) -> None:
        limits = ctx.limits
        super().__init__(ctx, Backoffs(limits.io_error_backoff / 10, longest_backoff_of(limits), now))
        self.backoffs.may_expire = 1  # a record for such a destination fails with its whole transaction
        self._wait = wait
        self._denied = denied
        self._bisection = Bisection(4 * limits.mark_query_records, limits.mark_query_bytes)
        self._probes: deque[StoredRecord] = deque()
        self._tried_probe = False  # at the last turn
        self._since_scan: set[LaneOrRow] = set()  # held or backed off since the scan under way was sent

    # -- scans

    def exclusion(self) -> Exclusion:
        """Return the exclusion of a scan that starts now."""
        self._since_scan.clear()
        backoffs, bisection = self.backoffs, self._bisection
        probes = {row_id(probe) for probe in [*backoffs.probes, *self._probes]}
        return Exclusion(bisection.lanes | backoffs.lanes, bisection.rows | backoffs.rows | probes, backoffs.topics)

    def due_in(self) -> float:
        """Return the seconds until the holds must be read, a probe sent, or a group tried."""
        if self._bisection or self._probes:
            return 0.0
        due = self.hold_cache.due_in() if self.holds else float("inf")
        probe_due = self.backoffs.next_due
        return max(0.0, due if probe_due is None else min(due, probe_due - now()))

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
        self.holds = holds
        if not holds and not self._since_scan:
            return list(records)
        since = self._since_scan
        kept = [record for record in records if not holds.covers(record) and lane_or_row(record) not in since]
        if len(kept) < len(records):
            self._ctx.watermark.reset("records that were read are held")
        return kept

    def scanned(self, *, found: bool) -> None:
        """Note if a scan found any rows."""
        self._bisection.is_idle = not found
        if not found:
            self.backoffs.may_expire = 1

    # -- retries

    @property
    def is_busy(self) -> bool:
        """True while records wait for a retry, or for the dead-letter topic."""
        return bool(self._bisection or self.backoffs or self._probes or self.holds.requests)

    @property
    def must_retry(self) -> bool:
        """True if so many records are in memory that groups must be tried before more are read."""
        return self._bisection.is_over_limit

    @property
    def may_retry(self) -> bool:
        """True if there is a group or a probe to try, and time for it."""
        return bool(self._probes or self._bisection) and self._bisection.has_time

    def collect_due_probes(self) -> None:
        """Collect the probes that are due."""
        if self.backoffs:
            self._probes.extend(self.backoffs.due_probes())
        self._report.update(self._bisection.records)

    def next_group(self) -> tuple[Group, float | None]:
        """Return the next group to try, and its commit timeout in seconds (None: the default)."""
        self._tried_probe = bool(self._probes) and not (self._bisection and (self._tried_probe or self.must_retry))
        if self._tried_probe:
            probe = self._probes.popleft()
            if self.holds.covers(probe):
                self.backoffs.end_probe(probe)
                self._ctx.watermark.reset("a record that was tried again and again is held")
                return (), None
            return [probe], _PROBE_PATIENCE_SECONDS
        group = self._bisection.next(self._is_kept_back)
        if self._bisection.left_some_out:
            self._ctx.watermark.reset("records of a failed transaction are held or backed off meanwhile")
        return group, None

    def _is_kept_back(self, record: StoredRecord) -> bool:
        is_backed_off = lane_or_row(record) in self.backoffs or record.topic in self.backoffs.topics
        return is_backed_off or self.holds.covers(record)

    def retry_later(self, records: Sequence[StoredRecord]) -> None:
        """Have the records of a failed transaction tried again, by themselves."""
        self._bisection.add(list(records))

    def spent_publishing(self, seconds: float) -> None:
        """Account for time spent on ordinary work."""
        self._bisection.spent_publishing(seconds)

    def spent_retrying(self, seconds: float) -> None:
        """Account for time spent on a retry."""
        self._bisection.spent_retrying(seconds)

    def succeeded(self, records: list[StoredRecord]) -> None:
        """Note published records."""
        self.backoffs.may_expire = 1
        self._succeeded(records)
        self._ctx.kafka.succeeded(all_of_it=not self.backoffs.is_unreachable)

    def timed_out(self, records: Sequence[StoredRecord], failures: list[Failure]) -> Aborted:
        """Return the end of a transaction whose records did not arrive in time, after an abort of our own."""
        error = KafkaError(KafkaError._MSG_TIMED_OUT, "not acknowledged in time")  # noqa: SLF001
        if not failures:
            failures += [Failure(record, error, partition=-1) for record in records]
        return Aborted(failures[0].error, record_at_fault=True)

    def handle(self, aborted: Aborted, group: Sequence[StoredRecord], failures: list[Failure]) -> None:
        """Decide on a failed retry of a group."""
        if aborted.error is None:  # our own choice
            self._put_back(group)
            return
        self._ctx.metrics.publish_error()
        if not failures and not aborted.record_at_fault:  # it is about the cluster, and not about the group
            self._ctx.kafka.failed(aborted.error.str())
            self._put_back(group)
            self._wait.back_off(self._ctx.limits.io_error_backoff)
            return
        if not failures and len(group) == 1:
            failures = [Failure(group[0], aborted.error, partition=-1)]
        poison: list[Failure] = []
        denied: list[Failure] = []
        others: list[Failure] = []
        for failure in failures:
            match decide(failure, alone=len(group) == 1, can_hold=True):
                case Retry():
                    poison.append(failure)
                case Hold():
                    (poison if failure.kind is ErrorKind.POISON else denied).append(failure)
                case _:
                    others.append(failure)
        self._hold_or_back_off_topics(denied)
        for failure in others:
            self._back_off_and_release(failure)
        if len(group) == 1:
            self.hold(poison)
        else:
            self._split(group, poison, aborted.error)

    def _split(self, group: Sequence[StoredRecord], poison: Sequence[Failure], error: KafkaError) -> None:
        gone = {record.id: record for record in group if self._is_kept_back(record)}
        self._bisection.release(gone.values())
        rest = [record for record in group if record.id not in gone]
        if len(rest) == 1 or (gone and not poison):
            self._bisection.put_first(rest)
        elif rest:
            code = poison[0].error.code() if poison else error.code()
            self._bisection.split(rest, {failure.record.id for failure in poison}, code)

    def _put_back(self, group: Sequence[StoredRecord]) -> None:
        # A probe stays one: its key is backed off, so a group would leave it out, and its destination wait for ever.
        self._bisection.put_first([record for record in group if not self.backoffs.not_sent(record)])

    def _back_off_and_release(self, failure: Failure) -> None:
        is_probe, _ = self._back_off(failure)
        if not is_probe:
            self._bisection.release([failure.record])
        self._since_scan.add(lane_or_row(failure.record))

    # -- holds

    def handle_refused(self, failures: Sequence[Failure]) -> None:
        """Decide on records that the client refused: no other record is to blame."""
        self.hold([failure for failure in failures if failure.kind is ErrorKind.POISON])
        for failure in failures:
            if failure.kind is not ErrorKind.POISON:
                self._back_off_and_release(failure)

    def hold(self, failures: Sequence[Failure]) -> None:
        """Hold records that failed alone, before the next scan."""
        if not failures:
            return
        self._ctx.metrics.publish_error(len(failures))
        for failure in failures:
            self._bisection.note_too_large(failure.record, failure.error.code())
        self._bisection.release(failure.record for failure in failures)
        self._since_scan.update(lane_or_row(failure.record) for failure in failures)
        holds = []
        for failure in failures:
            if decide(failure, alone=True, can_hold=self.hold_cache.is_writable) == Backoff(None):
                self._back_off_alone(failure)
            else:
                self.backoffs.end_probe(failure.record)
                holds.append(self._new_hold(failure))
        if holds:
            self._write(holds)

    def hold_denied_topics(self, cause: KafkaError | None, records: Sequence[StoredRecord]) -> None:
        """Hold the topics we may not write to, if that ended the producer in a transaction of these records."""
        if cause is not None and kind_of(cause) is ErrorKind.UNAUTHORIZED:
            self._hold_denied({record.topic: Failure(record, cause, alone=True) for record in reversed(records)})

    def _hold_or_back_off_topics(self, denied: Iterable[Failure]) -> None:
        failures = list(denied)
        by_topic = {failure.record.topic: failure for failure in failures}
        if by_topic:
            held = self._hold_denied(by_topic)
            for topic in by_topic.keys() - held:
                self._back_off_and_release(by_topic[topic])
            for failure in failures:
                if failure.record.topic in held:  # else its destination would wait for it, long after the release
                    self.backoffs.end_probe(failure.record)

    def _hold_denied(self, by_topic: dict[str, Failure]) -> set[str]:
        denied = self._denied.among(set(by_topic))
        if not denied or not self.hold_cache.is_writable:
            return set()
        self._write([new_hold(by_topic[topic], self._ctx.grant_write, dead_letter=False) for topic in sorted(denied)])
        return denied

    def hold_topic(self, topic: str, why: str) -> bool:
        """Hold a topic whose records end the producer; return False if that is not possible."""
        if not self.hold_cache.is_writable:
            _log.error(
                "records for topic %s end every term (%s); without a table of holds it cannot be held", topic, why
            )
            return False
        _log.error("topic %s is held: records for it, and for no other topic, end every term: %s", topic, why)
        self._write([NewHold(topic, None, None, "ends the producer", why)])
        return True

    def _write(self, holds: Sequence[NewHold]) -> None:
        hold_cache = self.hold_cache
        written = self._wait.retry_until_done(self._ctx.marker, lambda store: hold_cache.write(store, holds))
        if written is not None:
            self.holds = written
