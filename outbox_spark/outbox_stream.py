"""The outbox table as a stream of batches, without Spark: what is a batch, when is it over, what if all goes wrong.

Spark asks for the end of the next batch (`latest`), for its shards (`shards`), and says when all that lies before an
offset has been handled (`commit`). An offset names one batch: its number, its range of ids, how many rows, and into how
many shards it is split. The rows are those that carry the batch's mark, so a batch that is replayed has the same rows.

What holds:

1. A batch is purged only once Spark has said that it is over, by asking for the next one or by `commit`; and the purge
   is committed before the shards of the next one are handed out. So at most one batch is both handled and in the table.
2. Nothing is marked but by the leader, in the term it leads; a new term begins with `begin`, before anything else.
3. A batch that is in the table with a higher number than the last one was marked, and Spark does not know of it (the
   process died in between, or the checkpoint was deleted). It is handed out again under its number, lowest first.
4. A batch with a lower number that Spark has forgotten was never handed out by this checkpoint: its rows are set free.

While Spark works on a batch, the next one is marked on a thread of its own, and the last one purged on another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeVar

from outbox_core.errors import KafkaUnavailable, OutboxError, StoreUnavailable
from outbox_core.relay_marks import RelayMark
from outbox_spark.batch_store import Batch, BatchStore, Shard

_log = logging.getLogger(__name__)

T = TypeVar("T")

_REST_SECONDS = 0.05  # after a look that found nothing
_RETRY_SECONDS = 0.5
_TICK_SECONDS = 0.05
_PASSING = (StoreUnavailable, KafkaUnavailable)


class NotLeading(OutboxError):
    """A query cannot begin, as another process leads the outbox."""


class Offset(TypedDict):
    """The end of a batch, as it is in Spark's checkpoint."""

    batch: int
    shards: int
    first: int
    last: int
    rows: int


BEGINNING: Offset = {"batch": 0, "shards": 0, "first": 0, "last": 0, "rows": 0}


class Election(Protocol):
    """Says whether we lead."""

    def term(self) -> int | None:
        """The number of our claim while we lead, else None."""

    def stop(self) -> None:
        """Stop contending."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How a stream is cut.

    Attributes:
        shards: into how many parts a batch is split.
        limit: how many rows a batch has at most.
        patience: how many seconds a replay waits for leadership.
    """

    shards: int
    limit: int
    patience: float = 30.0


class OutboxStream:
    """One query's view of one outbox. Used by one thread; it has two of its own for the database.

    Args:
        settings: how to cut.
        election: whether we lead.
        make_store: makes a connection.
        settle: called when a term begins, with a store and a function that says whether the term is over; deletes what
            other leaders have published.
    """

    def __init__(
        self,
        settings: StreamSettings,
        election: Election,
        make_store: Callable[[], BatchStore],
        settle: Callable[[BatchStore, Callable[[], bool]], None],
    ) -> None:
        self._settings = settings
        self._election = election
        self._settle = settle
        self._marker = _StoreThread(make_store(), "outbox-spark-mark")
        self._purger = _StoreThread(make_store(), "outbox-spark-purge")
        self._term: int | None = None
        self._waiting: list[Batch] = []  # marked, and not handed out in this term
        self._marking: Future[Batch | None] | None = None
        self._purging: tuple[int, Future[int]] | None = None
        self._highest = 0
        self._purged = 0
        self._target: int | None = None
        self._look_at = 0.0

    # -- what Spark asks

    def latest(self, start: Offset, limit: int | None) -> Offset:
        """The end of the next batch; `start` if there is nothing, or we do not lead.

        Of a run that takes what is there, `start` is the end: so it is answered only when all is taken and purged.

        Args:
            start: the end of the last batch, which is over.
            limit: how many rows at most; None for all there are.

        Raises:
            OutboxError: if the table cannot be relayed.
            NotLeading: if a run that takes what is there has lost its leadership for too long.
        """
        if self._target is not None:
            return self._insist(lambda: self._end_of_next(self._lead(), start, limit))
        term = self._election.term()
        if term is None:
            return start
        try:
            return self._end_of_next(term, start, limit)
        except _PASSING as error:
            _log.warning("trying again: %s", error)
            time.sleep(_RETRY_SECONDS)
            return start

    def _end_of_next(self, term: int, start: Offset, limit: int | None) -> Offset:
        self._begin(term, start)
        self._finish(start)
        batch = self._next(term, limit)
        if batch is None:
            if self._target is not None:
                self._await_purge()  # Spark ends the query now, and waits for nothing
            return start
        return {
            "batch": batch.mark.batch,
            "shards": self._settings.shards,
            "first": batch.first,
            "last": batch.last,
            "rows": batch.rows,
        }

    def shards(self, start: Offset, end: Offset) -> list[Shard]:
        """The shards of the batch that ends at `end`; none if it is empty.

        Raises:
            NotLeading: if it is a replay, and another process leads for too long.
        """
        if end["batch"] <= start["batch"]:
            return []
        term = self._lead()
        self._insist(lambda: self._begin(term, start))
        self._insist(lambda: self._purge(start))
        self._waiting = [batch for batch in self._waiting if batch.mark.batch > end["batch"]]
        self._highest = max(self._highest, end["batch"])
        batch = Batch(RelayMark(term, end["batch"]), end["rows"], end["first"], end["last"])
        self._mark_ahead(term)
        return [Shard(number, end["shards"], batch) for number in range(end["shards"])]

    def commit(self, end: Offset) -> None:
        """Purge the batch that ends at `end`, without waiting for it."""
        self._insist(lambda: self._finish(end))

    def stop_at_present_end(self) -> None:
        """Take no rows from now on that are not there yet. Waits to lead, or the run would end with nothing done.

        Raises:
            NotLeading: if another process leads for too long.
        """
        self._lead()
        self._target = self._insist(lambda: self._marker.run(lambda store: store.highest_id()))

    def stop(self) -> None:
        """Finish the purge under way, set free what was marked ahead, stop contending."""
        try:
            self._await_purge()
            ahead = self._waiting + [batch for batch in [self._collect_mark()] if batch is not None]
            for batch in ahead:
                mark = batch.mark.leader_id
                self._marker.run(lambda store, mark=mark: store.release(mark, mark))  # type: ignore[misc]
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
                    "rows from it; start it again when that one has ended. What the table holds is safe there"
                )
            time.sleep(_TICK_SECONDS)
        return term

    def _begin(self, term: int, start: Offset) -> None:
        """Begin a term, if it is a new one: settle what others did, adopt their batches, sort out ours."""
        if term == self._term:
            return
        self._drop_mark_ahead()
        self._marker.run(lambda store: self._settle(store, lambda: self._election.term() != term))
        self._marker.run(lambda store: store.adopt(term))
        batches = self._marker.run(lambda store: store.batches(term))
        self._highest = max([start["batch"], *(batch.mark.batch for batch in batches)])
        self._waiting = []
        for batch in batches:
            if batch.mark.batch > start["batch"]:
                self._waiting.append(batch)
            elif batch.mark.batch < start["batch"] or not start["first"] <= batch.first <= batch.last <= start["last"]:
                mark = batch.mark.leader_id
                self._marker.run(lambda store, mark=mark: store.release(mark, mark))  # type: ignore[misc]
        self._purged = 0
        self._term = term

    def _next(self, term: int, limit: int | None) -> Batch | None:
        if self._waiting:
            return self._waiting[0]
        batch = self._collect_mark()
        if batch is None and time.monotonic() >= self._look_at:
            self._start_mark(term, limit)
            batch = self._collect_mark()
        if batch is None:
            self._look_at = time.monotonic() + _REST_SECONDS
            return None
        self._waiting = [batch]
        return batch

    # -- marks

    def _mark_ahead(self, term: int) -> None:
        if self._marking is None and not self._waiting:
            self._start_mark(term, self._settings.limit)

    def _start_mark(self, term: int, limit: int | None) -> None:
        mark, target = RelayMark(term, self._highest + 1), self._target
        self._marking = self._marker.submit(lambda store: store.mark_batch(mark, limit, target))

    def _collect_mark(self) -> Batch | None:
        """The batch that was being marked; None if there is none."""
        marking, self._marking = self._marking, None
        if marking is None:
            return None
        try:
            batch = marking.result()
        except StoreUnavailable:
            self._term = None  # it may have been marked or not: look, by beginning the term anew
            raise
        if batch is not None:
            self._highest = batch.mark.batch
        return batch

    def _drop_mark_ahead(self) -> None:
        marking, self._marking = self._marking, None
        if marking is not None:
            try:
                marking.result()
            except StoreUnavailable as error:
                _log.debug("what was marked ahead is looked for in the table: %s", error)

    # -- purges

    def _finish(self, end: Offset) -> None:
        """Begin to purge a batch that is over, unless that was done."""
        number = end["batch"]
        if self._term is None or not number or number <= self._purged:
            return
        if self._purging is not None and self._purging[0] >= number:
            return
        self._await_purge()
        batch = Batch(RelayMark(self._term, number), end["rows"], end["first"], end["last"])
        self._purging = number, self._purger.submit(lambda store: store.purge_batch(batch))

    def _purge(self, end: Offset) -> None:
        """Purge a batch that is over, and wait for it."""
        self._finish(end)
        self._await_purge()

    def _await_purge(self) -> None:
        if self._purging is None:
            return
        number, future = self._purging
        self._purging = None
        future.result()  # if it fails, the next call of `_finish` begins it again
        self._purged = number

    def _insist(self, act: Callable[[], T]) -> T:
        """Do something until database and Kafka are there; a query under way does not end for a short outage."""
        give_up_at = time.monotonic() + self._settings.patience
        while True:
            try:
                return act()
            except _PASSING as error:
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
