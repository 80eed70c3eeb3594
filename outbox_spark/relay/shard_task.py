"""One shard of an outbox for some seconds, exactly once: what a task of a relay does. No Spark.

    fence -> check the claim -> last manifest -> delete its rows -> (scan -> transaction -> purge)*

A shard is published as a harvester publishes a table: each transaction holds the manifest of its rows, and the purge of
a transaction is committed before the next one is. So the last manifest of a shard lists every row of it that can be
both in Kafka and in the table. Whatever died before, an attempt of this task, a relay or a harvester: who fences the
shard's transactional.id reads that manifest and deletes its rows before it reads any other.

The task reads the leader topic once after each fence, up to a message that it writes there itself, for a claim higher
than its own (`outbox_core.election.observer`); a later leader fences it. So a producer that has to be replaced (R13 of
docs/explanation-exactly-once.md) is not: the task begins again with the fence. Only before its first transaction it
may keep rows that took long to read (`_open_anew`). An attempt that is fenced ends, as another attempt of the same task
has come after it.

A record that a broker refuses fails a batch of records, and their transaction. So the task sends the rows of that
transaction again, some at a time, and each as a batch of its own: then reports name the record, which is held.

Rules are those of docs/spark-relay.md.

In a settled range (`plan.py`) the next rows are read while a transaction is under way. Scans and purges come from one
thread with one connection, in their order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NoReturn

from outbox_core.config.kafka_settings import batch_settings
from outbox_core.election.observer import highest_claim
from outbox_core.errors import InvalidRecord, KafkaUnavailable, OutboxError, RowsRemain, StoreUnavailable
from outbox_core.kafka.batch_sizes import BatchSizes
from outbox_core.kafka.clients import KafkaConfig, KafkaError
from outbox_core.kafka.errors import ErrorKind, explained, kind_of
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.record_producer import RecordProducer, Reports
from outbox_core.kafka.topics import TopicLimits
from outbox_core.kafka.tracking import Ledger, opening_key
from outbox_core.kafka.transactions import Aborted
from outbox_core.monitoring.publication import PublicationCounts
from outbox_core.stores.interface import (
    OversizedValue,
    StoredRecord,
    held_key,
    ids_and_times,
    lane_or_row,
    row_id,
)
from outbox_core.topic_names import topic_problem
from outbox_spark.relay.fencing import Fenced, fenced, ledger_after_fence, unless_ended
from outbox_spark.relay.plan import BatchPlan, ShardOutcome, Transform
from outbox_spark.relay.shard_rows import ShardRows

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5
_POLL_SECONDS = 0.01
_MOST_UNBATCHED = 500

_Refused = tuple[StoredRecord, KafkaError]

# They do not pass: of the record, of our rights, of a topic that librdkafka has waited for in vain.
_REFUSALS = (ErrorKind.POISON, ErrorKind.UNAUTHORIZED, ErrorKind.UNKNOWN_TOPIC)


class TopicRefused(OutboxError):
    """A topic that we may not write to, or that is not there: the right or the topic may be back in a moment."""


class Deposed(OutboxError):
    """A task of a deposed leader: the rows are the new leader's to publish."""


class _Replaced(Exception):
    """The producer cannot begin another transaction, or should not: fence anew."""


class ShardTask:
    """An attempt to publish one shard in one batch. Used once, by one thread; it has another one for the database.

    Tests make `failpoint` fail: "fenced", "scanned", "sent", "committed", "purged".
    """

    def __init__(self, plan: BatchPlan, number: int, *, failpoint: Callable[[str], None] = lambda _: None) -> None:
        self._plan = plan
        self._identity = TransactionalIdentity.of(plan.harvest, plan.outbox).of_shard(number)
        self._failpoint = failpoint
        self._began_at = time.monotonic()
        self._rows = ShardRows(plan, plan.ranges[number])
        self._limits = TopicLimits(self._identity.kafka)
        largest, is_compressed = batch_settings(self._identity.producer)
        self._batches = BatchSizes(self._limits.ask, largest=largest, is_compressed=is_compressed)
        self._fitted: int | None = None  # limit of the present producer's batches
        # Of deliveries in the present transaction, if it wants any: they cost more than all the rest.
        self._reports: Reports | None = None
        self._search_to: int | None = None  # up to this row, one may be refused: each is a batch of its own
        self._counts = PublicationCounts()

    def run(self) -> ShardOutcome:
        """Publish until the time is over or no row is left; return what was done, and the error that ended it."""
        failure: OutboxError | None = None
        with closing(self._limits), closing(self._rows):
            try:
                self._retry()
            except OutboxError as error:
                failure = error
            return ShardOutcome(
                self._identity.tracking_partition,
                self._counts.by_topic.total(),
                self._rows.settled,
                self._rows.reached,
                self._rows.most,
                time.monotonic() - self._began_at,
                type(failure).__name__ if failure is not None else "",
                str(failure) if failure is not None else "",
                self._counts,
            )

    def _retry(self) -> None:
        """Try for as long as patience lasts; outages, and producers that are of no more use, end a try alone."""
        while True:
            try:
                return self._try()
            except (Fenced, RowsRemain):  # the driver tells of the latter
                raise
            except (KafkaUnavailable, StoreUnavailable) as error:
                self._rows.begin_again(trusts=isinstance(error, KafkaUnavailable))
                if self._is_late():
                    raise
                _log.warning("trying again: %s", error)
                time.sleep(_PAUSE_SECONDS)
            except _Replaced:
                self._rows.begin_again()

    def _is_over(self) -> bool:
        return time.monotonic() - self._began_at >= self._plan.seconds

    def _is_late(self) -> bool:
        return time.monotonic() - self._began_at >= self._plan.patience

    def _try(self) -> None:
        self._fitted = self._batches.limit
        is_search = self._search_to is not None
        with fenced(self._identity.fitting(self._fitted, unbatched=is_search), self._is_late) as producer:
            self._failpoint("fenced")
            self._check_claim()
            self._rows.look_around()
            began, is_open = time.monotonic(), True
            ledger = self._settle(producer)
            rows = self._rows.next()
            if rows and time.monotonic() - began > self._identity.timeout / 3:
                self._open_anew(producer, ledger)
            while rows:
                self._failpoint("scanned")
                if self._search_to is not None and rows[0].id > self._search_to:
                    self._search_to = self._reports = None
                    raise _Replaced
                if not is_open:
                    self._begin(producer)
                is_open = False
                try:
                    self._publish(producer, rows)
                except KafkaUnavailable:
                    self._rows.failed(len(rows))  # they, or their manifest, may be too much at once
                    raise
                if self._is_over():
                    break
                rows = self._rows.next()
            if is_open:
                producer.abort()
            self._rows.join()

    def _check_claim(self) -> None:
        """Raise Deposed unless the claim of our plan is the highest one, now that we have fenced (rule 6)."""
        plan, term = self._plan, self._plan.term
        leader = plan.harvest.leader_names(plan.outbox)
        claim = highest_claim(self._identity.kafka, leader, term)
        if claim > term:
            raise Deposed(f"claim {claim} on {leader.topic} is higher than ours, {term}: another one leads")
        if claim < term:  # a new topic counts from 0
            raise Deposed(f"{leader.topic} does not show our claim, {term}: it was deleted or emptied meanwhile")

    def _settle(self, producer: RecordProducer) -> Ledger:
        """Delete what was published and not purged (rule 3); return what was read, and leave that transaction open."""
        identity = self._identity
        ledger = ledger_after_fence(identity, producer, self._is_late, stays_open=True)
        if ledger.opening is None:
            self._rows.delete_published(ledger, identity, self._is_late)
            return ledger
        unless_ended(producer.abort())  # reading topics may take longer than a transaction may
        self._rows.delete_published(ledger, identity, self._is_late)
        # It is read back once. This may replace the producer, so the claims have to be looked at again.
        unless_ended(identity.adopt(producer, self._plan.server_id, ledger, self._is_late))
        raise _Replaced

    def _open_anew(self, producer: RecordProducer, ledger: Ledger) -> None:
        """Replace a transaction that would not last for the records; their rows were read, which took long."""
        unless_ended(producer.abort())
        # To begin the attempt again would take as long again. If another one has published since, this one ends.
        unless_ended(self._identity.begin(producer, ledger, self._is_late))
        self._check_claim()

    def _begin(self, producer: RecordProducer) -> None:
        """Open the next transaction, unless that takes another producer (rule 5)."""
        if producer.must_replace:
            raise _Replaced
        unless_ended(producer.begin())

    # -- one transaction

    def _publish(self, producer: RecordProducer, rows: Sequence[StoredRecord]) -> None:
        """Commit a transaction of these rows, and begin to purge them. What cannot be sent at all is held."""
        began = time.monotonic()
        fitting, refused = _without_too_large(rows)
        transform = self._plan.transform
        records = fitting if transform is None else _transformed(fitting, transform)
        sent, more = self._send(producer, records) if records else ([], [])
        refused += more
        may_hold = bool(refused) and self._rows.may_hold()
        for record, error in refused:
            if kind_of(error) is not ErrorKind.POISON or not may_hold:
                unless_ended(producer.abort())
                raise _refusal([record], error, self._identity.kafka)
        if sent:
            to_blame = self._commit(producer, sent)
            if to_blame:
                self._hold(rows, self._first_of_keys(to_blame, rows))
            self._rows.succeeded((time.monotonic() - began) / self._identity.timeout)
            if self._search_to is not None:
                self._rows.most = min(self._rows.most, _MOST_UNBATCHED)
        else:
            cause = producer.failure
            unless_ended(producer.abort(cause))
            if records and not refused:  # what was read ahead comes after them
                why = "" if cause is None else f": {cause.str()}"
                raise KafkaUnavailable(f"the transaction failed before its first record{why}")
        unsent = {record.id for record in records} - {record.id for record in sent}
        self._rows.purge([row for row in fitting if row.id not in unsent] if unsent else fitting)
        self._failpoint("purged")
        if refused:
            self._hold(rows, refused)

    def _hold(self, rows: Sequence[StoredRecord], refused: Sequence[_Refused]) -> NoReturn:
        """Hold records with their keys, and read on without them."""
        by_id, kafka = {row.id: row for row in rows}, self._identity.kafka
        self._rows.hold([(by_id[record.id], explained(error, kafka)) for record, error in refused])
        raise _Replaced

    def _send(
        self, producer: RecordProducer, records: Sequence[StoredRecord]
    ) -> tuple[Sequence[StoredRecord], list[_Refused]]:
        """Put opening and records into the transaction; return those sent, and those that the client refuses."""
        self._fit(producer, records)
        identity = self._identity
        legal = _with_legal_topics(records)  # a thousand others may be longer than a record may be
        if legal:
            opening = Opening.of(identity.outbox, self._plan.server_id, legal).encode()
            topic, partition = identity.tracking_topic, identity.tracking_partition
            key = opening_key(identity.transactional_id)
            unless_ended(producer.send_manifest(topic, opening, partition, key=key))
        if self._reports is not None or self._search_to is not None:
            self._reports = Reports()
        sent = unless_ended(producer.send(records, self._is_late, self._reports))
        if sent is None:
            raise KafkaUnavailable("the producer's queue stayed full")
        self._failpoint("sent")
        return sent.records, [(failure.record, failure.error) for failure in sent.refused]

    def _commit(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> list[_Refused]:
        """Commit; or abort, and return the records to hold for it, or raise its error."""
        identity = self._identity
        # The manifest is written once every record is in Kafka, and the last transaction's rows are out of the table:
        # rule 4.
        if producer.all_arrive(identity.timeout, self._is_late):
            self._rows.join()
            ids, create_times = ids_and_times(records)
            manifest = Manifest(identity.outbox, ids, create_times, self._plan.server_id).encode()
            unless_ended(producer.send_manifest(identity.tracking_topic, manifest, identity.tracking_partition))
            outcome = unless_ended(producer.commit())
        else:
            outcome = unless_ended(producer.abort(producer.failure))
        if isinstance(outcome, Aborted):
            to_blame = [(each.record, each.error) for each in self._failures if self._is_to_blame(each)]
            if to_blame and self._rows.may_hold():
                return to_blame
            raise self._reason_of(outcome, records)
        self._counts.add(records)
        self._failpoint("committed")
        return []

    def _fit(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> None:
        """Begin again with smaller batches if a topic takes no larger ones: a producer cannot change its own."""
        self._batches.meet({record.topic for record in records})
        while self._batches.are_awaited and not self._is_late():
            time.sleep(_POLL_SECONDS)
        if self._batches.limit != self._fitted:
            producer.abort()
            raise _Replaced

    # -- what Kafka refuses

    @property
    def _failures(self) -> Sequence[Failure]:
        return self._reports.failures if self._reports is not None else ()

    def _is_to_blame(self, failure: Failure) -> bool:
        """Tell whether a record itself is refused: it names a partition that is missing, or was a batch of its own."""
        return _is_misdirected(failure) or (self._search_to is not None and failure.kind is ErrorKind.POISON)

    def _first_of_keys(self, to_blame: Sequence[_Refused], rows: Sequence[StoredRecord]) -> Sequence[_Refused]:
        """Return those of which no earlier row of the key waits: a hold would keep that back, too."""
        first = {row.id for row in {lane_or_row(row): row for row in reversed(rows)}.values()}
        found = [each for each in to_blame if each[0].id in first]
        if not found:  # those before are published first
            at = min(record.id for record, _ in to_blame)
            self._rows.most = sum(row.id < at for row in rows)
            raise _Replaced
        return found

    def _reason_of(self, outcome: Aborted, missing: Sequence[StoredRecord]) -> Exception:
        """Return the error of an aborted transaction: an outage or an unclear cause is retried, a refusal searched.

        What cannot be held, and what we may not write, is final.
        """
        failures = self._failures
        errors = [failure.error for failure in failures] + ([outcome.error] if outcome.error is not None else [])
        if any(error.code() == KafkaError.MSG_SIZE_TOO_LARGE for error in errors):
            # Smaller batches may be possible: the limit of the topic is not known.
            before = self._batches.limit
            self._batches.refused({record.topic for record in missing})
            if self._batches.limit != before:
                return KafkaUnavailable(f"a batch was too large for its topic, now {self._batches.limit} bytes at most")
        if self._search_to is None and ErrorKind.POISON in map(kind_of, errors) and self._rows.may_hold():
            self._search_to = missing[-1].id
            self._rows.most = min(self._rows.most, _MOST_UNBATCHED)
            what = "one of records %d to %d is refused, and is searched for: %s"
            _log.warning(what, missing[0].id, self._search_to, explained(errors[0], self._identity.kafka))
            return _Replaced()
        refused = [failure for failure in failures if failure.kind in _REFUSALS]
        if refused:
            return _refusal([failure.record for failure in refused], refused[0].error, self._identity.kafka)
        if outcome.error is None:
            return KafkaUnavailable("the transaction was aborted")
        is_named_next = outcome.error.code() == KafkaError._UNKNOWN_PARTITION and self._reports is None  # noqa: SLF001
        if kind_of(outcome.error) in _REFUSALS and not is_named_next:
            return _refusal(missing, outcome.error, self._identity.kafka)
        self._reports = Reports()  # the next try tells which record failed
        return KafkaUnavailable(outcome.error.str())


def _is_misdirected(failure: Failure) -> bool:
    """Tell whether a record names a partition that its topic does not have: this alone is never a batch's fault."""
    return failure.error.code() == KafkaError._UNKNOWN_PARTITION and failure.record.partition >= 0  # noqa: SLF001


def _transformed(rows: Sequence[StoredRecord], transform: Transform) -> Sequence[StoredRecord]:
    """Return what a transform makes of rows. Raises InvalidRecord if it changes what tells them apart."""
    records = []
    for row in rows:
        record = transform(row)
        if record is None:
            continue
        if row_id(record) != row_id(row):
            raise InvalidRecord(f"record {row.id}: a transform must keep id and create_time; it made {row_id(record)}")
        records.append(record)
    return records


def _with_legal_topics(records: Sequence[StoredRecord]) -> Sequence[StoredRecord]:
    """Return records without those that name no legal topic; the producer refuses these."""
    if not any(map(topic_problem, {record.topic for record in records})):
        return records
    return [record for record in records if topic_problem(record.topic) is None]


def _without_too_large(rows: Sequence[StoredRecord]) -> tuple[Sequence[StoredRecord], list[_Refused]]:
    """Return rows without those whose values were not read, and later ones of their keys; and those."""
    if not any(isinstance(row.value, OversizedValue) for row in rows):
        return rows, []
    fitting: list[StoredRecord] = []
    refused: list[_Refused] = []
    lanes: set[tuple[str, str]] = set()
    for row in rows:
        lane = None if row.key is None else (row.topic, held_key(row.key))
        if lane in lanes:
            continue
        if isinstance(value := row.value, OversizedValue):
            sizes = f"have {value.size:,} bytes, and the producer's message.max.bytes is {value.limit:,}"
            refused.append((row, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, f"key, value and headers {sizes}")))
            lanes.update(() if lane is None else (lane,))
        else:
            fitting.append(row)
    return fitting, refused


def _refusal(among: Sequence[StoredRecord], error: KafkaError, kafka: KafkaConfig) -> OutboxError:
    kind = kind_of(error)
    if kind not in _REFUSALS:
        return KafkaUnavailable(error.str())
    first, last = among[0], among[-1]
    which = f"record {first.id}" if len(among) == 1 else f"one of records {first.id} to {last.id}"
    topics = sorted({record.topic for record in among})
    where = f" for topic {topics[0]!r}" if len(topics) == 1 else ""
    return (InvalidRecord if kind is ErrorKind.POISON else TopicRefused)(
        f"{which}{where}: {explained(error, kafka)}; nothing of its transaction was published. Let an ordinary "
        "harvester run, which sets such a record's key aside, or correct the row"
    )
