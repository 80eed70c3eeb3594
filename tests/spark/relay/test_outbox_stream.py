"""The outbox as a stream, without Spark and services: each row is published once, in order, whichever step dies."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_core.errors import StoreUnavailable
from outbox_core.stores.relay_marks import RelayMark
from outbox_spark.relay.batch_store import Batch
from outbox_spark.relay.stream import BEGINNING, NotLeading, OutboxStream, StreamSettings
from tests.spark.relay.engine import STEPS, Checkpoint, Engine, Killed


@dataclass
class World:
    """A table, a log, and the manifests of the shards."""

    rows: dict = field(default_factory=dict)  # id -> (key, mark)
    log: list = field(default_factory=list)  # (key, id) in the order of their transactions
    manifests: dict = field(default_factory=dict)  # shard -> ids
    terms: int = 0
    outages: int = 0
    purge_seconds: float = 0.0

    def insert(self, keys):
        for key in keys:
            self.rows[len(self.rows) + len(self.log) + 1] = (key, None)

    def settle(self, *_):
        for identities in self.manifests.values():
            for identity in identities:
                self.rows.pop(identity, None)

    def read(self, shard):
        mark = shard.batch.mark
        return [
            (identity, key)
            for identity, (key, found) in sorted(self.rows.items())
            if found == mark and key % shard.of == shard.number
        ]

    def publish(self, shard, rows):
        missing = [row for row in rows if row[0] not in self.manifests.get(shard.number, ())]
        self.log += [(key, identity) for identity, key in missing]
        if rows:
            self.manifests[shard.number] = [identity for identity, _ in rows]


class MemoryStore:
    """A `BatchStore` of a `World`."""

    def __init__(self, world):
        self._world = world

    def mark_batch(self, mark, limit, up_to=None):
        if self._world.outages:
            self._world.outages -= 1
            raise StoreUnavailable("away", in_doubt=True)
        free = [n for n, (_, found) in sorted(self._world.rows.items()) if found is None or found.term < mark.term]
        chosen = [n for n in free if up_to is None or n <= up_to][:limit]
        for number in chosen:
            self._world.rows[number] = (self._world.rows[number][0], mark)
        return Batch(mark, len(chosen), chosen[0], chosen[-1]) if chosen else None

    def batches(self, term):
        found = defaultdict(list)
        for number, (_, mark) in sorted(self._world.rows.items()):
            if mark is not None and mark.term == term:
                found[mark].append(number)
        return [Batch(mark, len(ids), ids[0], ids[-1]) for mark, ids in sorted(found.items())]

    def adopt(self, term):
        for number, (key, mark) in self._world.rows.items():
            if mark is not None:
                self._world.rows[number] = (key, RelayMark(term, mark.batch))

    def release(self, first, last):
        for number, (key, mark) in self._world.rows.items():
            if mark is not None and first <= mark.leader_id <= last:
                self._world.rows[number] = (key, None)

    def purge_batch(self, batch):
        time.sleep(self._world.purge_seconds)
        gone = [n for n, (_, mark) in self._world.rows.items() if mark == batch.mark and batch.first <= n <= batch.last]
        for number in gone:
            del self._world.rows[number]
        return len(gone)

    def highest_id(self):
        return max(self._world.rows, default=0)

    def close(self):
        pass


class Term:
    def __init__(self, number):
        self.number = number

    def term(self):
        return self.number

    def stop(self):
        pass


def stream_of(world, *, shards=2, limit=4, term=None, patience=0.3):
    """Return a stream in a term of its own."""
    world.terms += 1
    return OutboxStream(
        StreamSettings(shards=shards, limit=limit, patience=patience),
        term or Term(world.terms),
        lambda: MemoryStore(world),
        world.settle,
    )


def engine_of(world, checkpoint, *, kill_at=None, shards=2, limit=4):
    """Return an engine in a term of its own."""
    stream = stream_of(world, shards=shards, limit=limit)
    return Engine(stream, world.read, world.publish, checkpoint, kill_at=kill_at, limit=limit)


def assert_each_once_in_order(world, count):
    """Assert that all rows were published once, those of a key in the order of their ids, and that none is left."""
    assert sorted(identity for _, identity in world.log) == list(range(1, count + 1))
    of_key = defaultdict(list)
    for key, identity in world.log:
        of_key[key].append(identity)
    assert all(identities == sorted(identities) for identities in of_key.values())


LIFE = st.tuples(
    st.tuples(st.integers(0, 3), st.sampled_from(STEPS)),
    st.sampled_from(["keep", "delete", "lose-last-commit"]),
    st.integers(1, 4),
    st.integers(1, 7),
)


@settings(max_examples=300, deadline=None)
@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=30), lives=st.lists(LIFE, max_size=4))
def test_whatever_dies_each_row_is_published_once_and_in_order(keys, lives):
    """Engines killed at any step, with or without their checkpoint, publish each row once, in order per key."""
    world, checkpoint = World(), Checkpoint()
    world.insert(keys)
    for kill_at, fate, shards, limit in lives:
        engine = engine_of(world, checkpoint, kill_at=kill_at, shards=shards, limit=limit)
        try:
            engine.run()
        except Killed:
            pass
        finally:
            engine.stream._marker._thread.shutdown()
            engine.stream._purger._thread.shutdown()
        if fate == "delete":
            checkpoint = Checkpoint()
        elif fate == "lose-last-commit":
            checkpoint.lose_last_commit()
    engine = engine_of(world, checkpoint)
    engine.run()
    engine.stream.stop()
    assert_each_once_in_order(world, len(keys))
    world.settle()
    assert not world.rows


def test_a_replay_has_the_same_rows():
    """A batch that was logged and not finished is handed out again with exactly its rows, although more have come."""
    world, checkpoint = World(), Checkpoint()
    world.insert([1, 2, 3])
    first = engine_of(world, checkpoint, kill_at=(0, "logged"), limit=2)
    with pytest.raises(Killed):
        first.run()
    world.insert([4, 5])
    stream = stream_of(world, shards=1)
    shards = stream.shards(BEGINNING, checkpoint.offsets[0])
    assert sorted(row for shard in shards for row in world.read(shard)) == [(1, 1), (2, 2)]
    assert len(shards) == checkpoint.offsets[0]["shards"] == 2
    stream.stop()


def test_what_was_marked_ahead_is_free_after_a_stop():
    """A stream that stops leaves no mark on rows that it has not handed out."""
    world = World()
    world.insert(range(10))
    stream = stream_of(world, limit=3)
    end = stream.latest(BEGINNING, 3)
    stream.shards(BEGINNING, end)
    stream.stop()
    assert [number for number, (_, mark) in world.rows.items() if mark is not None] == [1, 2, 3]


def test_nothing_is_marked_without_leadership():
    """While another process leads no row is marked, and there is no new batch."""
    world = World()
    world.insert([1])
    stream = stream_of(world, term=Term(None))
    assert stream.latest(BEGINNING, 5) == BEGINNING
    assert world.rows[1] == (1, None)
    stream.stop()


def test_a_replay_without_leadership_fails():
    """Without leadership, a batch that has to be finished and an available-now run fail instead of passing for done."""
    world = World()
    stream = stream_of(world, term=Term(None))
    with pytest.raises(NotLeading, match="another process has led"):
        stream.shards(BEGINNING, {"batch": 1, "shards": 1, "first": 1, "last": 1, "rows": 1})
    with pytest.raises(NotLeading, match="another process has led"):
        stream.stop_at_present_end()
    stream.stop()


def test_a_mark_in_doubt_is_looked_for():
    """After a mark whose outcome is unknown the table is read anew, and the stream goes on."""
    world = World(outages=1)
    world.insert([1, 2])
    stream = stream_of(world)
    assert stream.latest(BEGINNING, 5) == BEGINNING
    assert stream.latest(BEGINNING, 5)["rows"] == 2
    stream.stop()


def test_an_available_now_run_ends():
    """Rows that come after the run has begun are left for the next one."""
    world = World()
    world.insert([1, 2])
    stream = stream_of(world)
    stream.stop_at_present_end()
    world.insert([3])
    end = stream.latest(BEGINNING, 5)
    assert (end["first"], end["last"]) == (1, 2)
    stream.shards(BEGINNING, end)
    assert stream.latest(end, 5) == end
    stream.stop()
    assert world.rows == {3: (3, None)}


def test_an_available_now_run_does_not_end_for_an_outage():
    """A database that is away for a moment does not end an available-now run; one that stays away is an error."""
    world = World()
    world.insert([1, 2])
    stream = stream_of(world)
    stream.stop_at_present_end()
    world.outages = 1
    assert stream.latest(BEGINNING, 5)["rows"] == 2
    stream.stop()
    other = stream_of(world)
    other.stop_at_present_end()
    world.outages = 1000
    with pytest.raises(StoreUnavailable):
        other.latest(BEGINNING, 5)
    other.stop()


def test_an_available_now_run_does_not_end_for_another_leader():
    """A loss of leadership during an available-now run is an error: it does not pass for the end of the rows."""
    world, term = World(), Term(1)
    world.insert([1, 2])
    stream = stream_of(world, term=term)
    stream.stop_at_present_end()
    term.number = None
    with pytest.raises(NotLeading, match="another process has led"):
        stream.latest(BEGINNING, 5)
    term.number = 2
    assert stream.latest(BEGINNING, 5)["rows"] == 2
    stream.stop()


def test_an_available_now_run_ends_with_its_last_purge():
    """The last batch has been purged before Spark gets the answer that no row is left."""
    world = World(purge_seconds=0.3)
    world.insert([1, 2])
    stream = stream_of(world)
    stream.stop_at_present_end()
    end = stream.latest(BEGINNING, 5)
    stream.shards(BEGINNING, end)
    assert stream.latest(end, 5) == end
    assert world.rows == {}
    stream.stop()


def test_a_strange_checkpoint_costs_nothing():
    """A checkpoint that is ahead of the table's batches keeps no row from being published."""
    world, checkpoint = World(), Checkpoint()
    world.insert([1, 2, 3])
    with pytest.raises(Killed):
        engine_of(world, checkpoint, kill_at=(0, "logged")).run()
    strange = Checkpoint([{"batch": 500, "shards": 2, "first": 9000, "last": 9999, "rows": 10}], 1)
    engine = engine_of(world, strange)
    engine.run()
    engine.stream.stop()
    assert_each_once_in_order(world, 3)
