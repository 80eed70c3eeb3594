"""The outbox table as a stream of batches: their beginning, their end, and their recovery. No Spark.

Spark asks for the end of the next batch (`latest`), for its shards (`shards`), and reports that it has handled all rows
before an offset (`commit`). An offset names one batch, whose rows carry its mark: a replayed batch has the same rows.

1. A batch is purged only after Spark has finished it, by asking for the next one or by `commit`; and the purge is
   committed before the shards of the next one are handed out. So at most one batch is both handled and in the table.
2. Only the leader marks, in the term it leads; a new term begins with `_begin`, before anything else.
3. A batch with a higher number than the last one was marked, and Spark does not know it (the process died in between,
   or the checkpoint was deleted). It is handed out again under its number, lowest first.
4. A batch with a lower number that Spark has forgotten was never handed out by this checkpoint: its marks are cleared.

While Spark works on a batch, a thread marks the next one, and another purges the last one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeVar

from outbox_core.errors import KafkaUnavailable, OutboxError, StoreUnavailable
from outbox_core.kafka.transactions import GiveUp
from outbox_core.stores.relay_marks import RelayMark
from outbox_spark.relay.batch_store import Batch, BatchStore, Shard

_log = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_SECONDS = 0.05  # after a mark that found nothing
_RETRY_SECONDS = 0.5
_POLL_SECONDS = 0.05
_OUTAGES = (StoreUnavailable, KafkaUnavailable)


class NotLeading(OutboxError):
    """A query that cannot begin, as another process leads the outbox."""


class Offset(TypedDict):
    """The end of a batch in Spark's checkpoint: its number, shards, range of ids and number of rows."""

    batch: int
    shards: int
    first: int
    last: int
    rows: int


BEGINNING: Offset = {"batch": 0, "shards": 0, "first": 0, "last": 0, "rows": 0}


class Election(Protocol):
    """This process's leadership."""

    def term(self) -> int | None:
        """Return the number of our claim while we lead, else None."""

    def stop(self) -> None:
        """Stop contending."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """Limits of a stream: shards and rows of a batch, and the seconds for which a replay waits for leadership."""

    shards: int
    limit: int
    patience: float = 30.0


class OutboxStream:
    """One query's view of one outbox. Used by one thread; it has two of its own for the database."""

    def __init__(
        self,
        settings: StreamSettings,
        election: Election,
        make_store: Callable[[], BatchStore],
        purge_published: Callable[[BatchStore, GiveUp], None],
    ) -> None:
        self._settings = settings
        self._election = election
        self._purge_published = purge_published
        self._marker = _StoreThread(make_store(), "outbox-spark-mark")
        self._purger = _Purger(make_store(), "outbox-spark-purge")
        self._term: int | None = None
        self._waiting: list[Batch] = []  # marked, and not handed out in this term
        self._marking: Future[Batch | None] | None = None
        self._highest = 0
        self._last_id: int | None = None  # of a run up to the present end
        self._idle_until = 0.0

    # -- Spark's calls

    def latest(self, start: Offset, limit: int | None) -> Offset:
        """Return the end of the next batch, of `limit` rows at most; `start` if there is none, or we do not lead.

        A run up to the present end gets `start` only after all rows are handled and purged: it ends then. It raises
        NotLeading if it has lost its leadership for too long.
        """
        if self._last_id is not None:
            return self._retry_outages(lambda: self._end_of_next(self._lead(), start, limit))
        term = self._election.term()
        if term is None:
            return start
        try:
            return self._end_of_next(term, start, limit)
        except _OUTAGES as error:
            _log.warning("trying again: %s", error)
            time.sleep(_RETRY_SECONDS)
            return start

    def _end_of_next(self, term: int, start: Offset, limit: int | None) -> Offset:
        self._begin(term, start)
        self._purge(start)
        batch = self._next(term, limit)
        if batch is None:
            if self._last_id is not None:
                self._purger.wait()  # Spark ends the query now, and waits for nothing
            return start
        return {
            "batch": batch.mark.batch,
            "shards": self._settings.shards,
            "first": batch.first,
            "last": batch.last,
            "rows": batch.rows,
        }

    def shards(self, start: Offset, end: Offset) -> list[Shard]:
        """Return the shards of the batch that ends at `end`; none if it is empty. Raises NotLeading."""
        if end["batch"] <= start["batch"]:
            return []
        term = self._lead()
        self._retry_outages(lambda: self._begin(term, start))
        self._retry_outages(lambda: self._purge(start, wait=True))
        self._waiting = [batch for batch in self._waiting if batch.mark.batch > end["batch"]]
        self._highest = max(self._highest, end["batch"])
        batch = Batch(RelayMark(term, end["batch"]), end["rows"], end["first"], end["last"])
        if self._marking is None and not self._waiting:
            self._start_mark(term, self._settings.limit)
        return [Shard(number, end["shards"], batch) for number in range(end["shards"])]

    def commit(self, end: Offset) -> None:
        """Start to purge the batch that ends at `end`."""
        self._retry_outages(lambda: self._purge(end))

    def stop_at_present_end(self) -> None:
        """Take no later rows from now on. Waits to lead, or the run would end at once. Raises NotLeading."""
        self._lead()
        self._last_id = self._retry_outages(lambda: self._marker.run(lambda store: store.highest_id()))

    def stop(self) -> None:
        """Finish the purge under way, clear the marks of batches not handed out, stop contending."""
        try:
            self._purger.wait()
            for batch in self._waiting + [batch for batch in [self._collect_mark()] if batch is not None]:
                self._clear(batch)
        except OutboxError as error:
            _log.warning("rows may stay marked, which does no harm: %s", error)
        finally:
            self._marker.close()
            self._purger.close()
            self._election.stop()

    # -- terms

    def _lead(self) -> int:
        give_up_at = time.monotonic() + self._settings.patience
        while (term := self._election.term()) is None:
            if time.monotonic() > give_up_at:
                raise NotLeading(
                    f"another process has led the outbox for {self._settings.patience:g} s, so this query cannot take "
                    "rows from it; start it again when that one has ended. The rows in the table are safe"
                )
            time.sleep(_POLL_SECONDS)
        return term

    def _begin(self, term: int, start: Offset) -> None:
        """Begin a term, if it is a new one: purge rows of others, adopt their batches, clear forgotten ones."""
        if term == self._term:
            return
        marking, self._marking = self._marking, None
        if marking is not None:
            try:
                marking.result()
            except StoreUnavailable as error:
                _log.debug("the table will show whether a batch was marked: %s", error)
        self._marker.run(lambda store: self._purge_published(store, lambda: self._election.term() != term))
        self._marker.run(lambda store: store.adopt(term))
        batches = self._marker.run(lambda store: store.batches(term))
        self._highest = max([start["batch"], *(batch.mark.batch for batch in batches)])
        self._waiting = []
        for batch in batches:
            if batch.mark.batch > start["batch"]:
                self._waiting.append(batch)
            elif batch.mark.batch < start["batch"] or not start["first"] <= batch.first <= batch.last <= start["last"]:
                self._clear(batch)
        self._purger.purged = 0
        self._term = term

    def _next(self, term: int, limit: int | None) -> Batch | None:
        if self._waiting:
            return self._waiting[0]
        batch = self._collect_mark()
        if batch is None and time.monotonic() >= self._idle_until:
            self._start_mark(term, limit)
            batch = self._collect_mark()
        if batch is None:
            self._idle_until = time.monotonic() + _IDLE_SECONDS
            return None
        self._waiting = [batch]
        return batch

    # -- marks and purges

    def _start_mark(self, term: int, limit: int | None) -> None:
        mark, last_id = RelayMark(term, self._highest + 1), self._last_id
        self._marking = self._marker.submit(lambda store: store.mark_batch(mark, limit, last_id))

    def _collect_mark(self) -> Batch | None:
        """Wait for the mark under way; return its batch, None if there is none."""
        marking, self._marking = self._marking, None
        if marking is None:
            return None
        try:
            batch = marking.result()
        except StoreUnavailable:
            self._term = None  # the batch may have been marked: begin the term anew, which reads the table
            raise
        if batch is not None:
            self._highest = batch.mark.batch
        return batch

    def _clear(self, batch: Batch) -> None:
        mark = batch.mark.leader_id
        self._marker.run(lambda store: store.release(mark, mark))

    def _purge(self, end: Offset, *, wait: bool = False) -> None:
        if self._term is not None and end["batch"]:
            self._purger.start(Batch(RelayMark(self._term, end["batch"]), end["rows"], end["first"], end["last"]))
        if wait:
            self._purger.wait()

    def _retry_outages(self, act: Callable[[], T]) -> T:
        """Retry until database and Kafka are there; a query under way does not end for a short outage."""
        give_up_at = time.monotonic() + self._settings.patience
        while True:
            try:
                return act()
            except _OUTAGES as error:
                if time.monotonic() > give_up_at:
                    raise
                _log.warning("trying again: %s", error)
                time.sleep(_RETRY_SECONDS)


class _StoreThread:
    """A thread with a connection of its own."""

    def __init__(self, store: BatchStore, name: str) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, work: Callable[[BatchStore], T]) -> Future[T]:
        return self._thread.submit(work, self._store)

    def run(self, work: Callable[[BatchStore], T]) -> T:
        return self.submit(work).result()

    def close(self) -> None:
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)


class _Purger(_StoreThread):
    """A thread that purges one batch after the other; `purged` is the number of the last one in this term."""

    purged = 0
    _under_way: tuple[int, Future[int]] | None = None

    def start(self, batch: Batch) -> None:
        """Start to purge a batch, unless that was done or is under way."""
        number = batch.mark.batch
        if number <= self.purged or (self._under_way is not None and self._under_way[0] >= number):
            return
        self.wait()
        self._under_way = number, self.submit(lambda store: store.purge_batch(batch))

    def wait(self) -> None:
        """Wait for the purge under way; if it fails, the next `start` repeats it."""
        if self._under_way is not None:
            (number, future), self._under_way = self._under_way, None
            future.result()
            self.purged = number
