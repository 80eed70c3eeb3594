"""Ranges and positions, without services: whatever commits late, each row is published, and in order per key."""

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_core.stores.interface import NO_FLOOR, HoldSet, RowQuery, StoredRecord
from outbox_spark.relay.plan import Planner, SettledIds, ShardOutcome
from outbox_spark.relay.shard_store import Place, ShardRange, Sight

PLACE = Place("sequence", "1", "2", "now")


@dataclass
class World:
    """A table, its open writers, and what was published; a `ShardStore` of itself."""

    rows: dict = field(default_factory=dict)  # id -> (key, number of its commit), of visible rows
    open: dict = field(default_factory=dict)  # writer -> [(id, key)]
    drawn: int = 0
    commits: int = 0
    published: list = field(default_factory=list)  # (key, id, number of its commit)
    held: frozenset = frozenset()
    place: Place | None = PLACE

    @property
    def holds(self):
        return SimpleNamespace(read=lambda: HoldSet(lanes=self.held))

    def write(self, writer, key):
        self.drawn += 1
        self.open.setdefault(writer, []).append((self.drawn, key))

    def commit(self, writer):
        self.commits += 1
        for identity, key in self.open.pop(writer, []):
            self.rows[identity] = (key, self.commits)

    def sight(self):
        unusable = "" if self.place is not None else "its ids prove nothing"
        return Sight(self.drawn, frozenset(map(str, self.open)), self.place, unusable)

    def scan_shard(self, query: RowQuery, wanted: ShardRange):
        if wanted.is_settled and wanted.place != self.place:
            return []
        after = wanted.after if wanted.place == self.place else NO_FLOOR.id
        found = [
            StoredRecord(identity, "t", key, b"", None, None, -1, 0)
            for identity, (key, _) in sorted(self.rows.items())
            if identity > after
            and (wanted.up_to is None or identity <= wanted.up_to)
            and ord(key) % wanted.of == wanted.number
            and ("t", key) not in query.holds.lanes
        ]
        return found[: query.limit]

    def run(self, wanted, holds, transactions, happens):
        """Do what a task does for so many transactions; `happens` is called between its steps."""
        after = wanted.after
        for _ in range(transactions):
            rows = self.scan_shard(RowQuery(2, holds=holds), replace(wanted, after=after))
            happens()
            if not rows:
                reached = wanted.up_to if wanted.is_settled else wanted.after
                return ShardOutcome(wanted.number, reached=reached)
            for row in rows:
                key, commit = self.rows.pop(row.id)
                self.published.append((key, row.id, commit))
            after = rows[-1].id if wanted.is_settled else wanted.after
            happens()
        return ShardOutcome(wanted.number, reached=after if wanted.is_settled else wanted.after)


class Chance:
    """Writers, holds and servers that do something between any two steps."""

    def __init__(self, seed, world):
        self._random, self._world = random.Random(seed), world

    def __call__(self):
        chance, world = self._random, self._world
        for _ in range(chance.randrange(3)):
            if chance.random() < 0.7:
                world.write(chance.randrange(3), chance.choice("abc"))
            else:
                world.commit(chance.randrange(3))
        if chance.random() < 0.1:
            world.held = frozenset() if world.held else frozenset({("t", chance.choice("abc"))})
        if chance.random() < 0.05:
            world.place = PLACE._replace(started=str(chance.random()))


def batch(world, planner, transactions, happens=lambda: None):
    """Run the next batch; tell whether there was one."""
    ranges = planner.next()
    for wanted in ranges:
        planner.finished(world.run(wanted, planner.holds, transactions, happens))
    return bool(ranges)


def overtaken(published):
    """Return the rows that come behind a row of their key that was drawn and committed after them."""
    return [
        (late, identity)
        for position, (key, identity, commit) in enumerate(published)
        for late_key, late, late_commit in published[position + 1 :]
        if key == late_key and late < identity and late_commit <= commit
    ]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), shards=st.integers(1, 3), batches=st.integers(1, 12))
def test_each_row_is_published_once_and_in_order(seed, shards, batches):
    """Of two rows of a key, the one that was drawn and committed before the other is published before it."""
    world = World()
    happens, planner = Chance(seed, world), Planner(world, shards)
    for number in range(batches):
        happens()
        batch(world, planner, 1 + number % 3, happens)
    world.held = frozenset()
    for writer in list(world.open):
        world.commit(writer)
    while world.rows:
        assert batch(world, planner, 5), "rows are left, and none is handed out"
    assert sorted(identity for _, identity, _ in world.published) == list(range(1, world.drawn + 1))
    assert overtaken(world.published) == []


def test_ids_are_settled_when_their_writers_have_ended():
    """The last id drawn is settled once no transaction is left of those that were open after it was read."""
    settled = SettledIds()
    settled.see(Sight(5, frozenset({"a", "b"}), PLACE))
    assert settled.id == NO_FLOOR.id
    settled.see(Sight(9, frozenset({"b", "c"}), PLACE))
    assert settled.id == NO_FLOOR.id
    settled.see(Sight(12, frozenset({"c"}), PLACE))
    assert settled.id == 5
    settled.see(Sight(12, frozenset(), PLACE))
    assert settled.id == 12


def test_a_position_is_of_one_place():
    """Another table, server or a sequence that was set back takes a position's proof away."""
    settled = SettledIds()
    assert not settled.see(Sight(5, frozenset(), PLACE))
    assert settled.see(Sight(6, frozenset(), PLACE))
    assert not settled.see(Sight(6, frozenset(), PLACE._replace(table_file="9")))
    assert not settled.see(Sight(3, frozenset(), PLACE._replace(table_file="9")))
    assert settled.id == 3


def test_positions_of_another_place_are_not_handed_out():
    """After a change of place, or of holds, every shard begins at the head."""
    world = World()
    planner = Planner(world, 2)
    for change in ({"place": PLACE._replace(table_file="9")}, {"held": frozenset({("t", "z")})}):
        for key in "abcd" * 3:
            world.write(0, key)
        world.commit(0)
        batch(world, planner, 1)
        assert {wanted.after for wanted in planner.next()} != {NO_FLOOR.id}
        for name, value in change.items():
            setattr(world, name, value)
        assert {wanted.after for wanted in planner.next()} == {NO_FLOOR.id}


def test_a_table_whose_ids_prove_nothing_is_read_from_its_head():
    """Without evidence no range is settled, and no row is kept back."""
    world = World(place=None)
    for key in "ab":
        world.write(0, key)
    world.commit(0)
    (wanted,) = Planner(world, 1).next()
    assert (wanted.is_settled, wanted.after, wanted.up_to) == (False, NO_FLOOR.id, None)


def test_held_rows_are_walked_through_once():
    """An idle relay does not look through all held rows again and again; a release begins at the head."""
    world = World(held=frozenset({("t", "a")}))
    for _ in range(5):
        world.write(0, "a")
    world.commit(0)
    planner, looked = Planner(world, 1), []
    scan = world.scan_shard
    world.scan_shard = lambda query, wanted: looked.append(wanted.after) or scan(query, wanted)
    assert [planner.next() for _ in range(3)] == [()] * 3
    assert looked == [NO_FLOOR.id, 5, 5]
    world.held = frozenset()
    assert planner.next()[0].after == NO_FLOOR.id


def test_a_shard_begins_with_as_many_rows_as_proved_right():
    """The size of transactions that a shard has come to is that of its next batch."""
    world = World()
    for key in "abcd":
        world.write(0, key)
    world.commit(0)
    planner = Planner(world, 2)
    assert {wanted.rows for wanted in planner.next()} == {None}
    planner.finished(ShardOutcome(1, rows=7))
    assert [wanted.rows for wanted in planner.next()] == [None, 7]


def test_a_run_of_what_is_there_ends():
    """A run up to an id hands out no later rows."""
    world = World()
    for key in "abcd":
        world.write(0, key)
    world.commit(0)
    planner = Planner(world, 1, up_to=2)
    (wanted,) = planner.next()
    assert wanted.up_to == 2
    planner.finished(world.run(wanted, planner.holds, 9, lambda: None))
    assert planner.next() == ()
    assert sorted(world.rows) == [3, 4]
