"""What the settled floor does with what it is shown; that it is right is shown in tests/integration/test_floor.py."""

import logging

import pytest

from outbox_core.harvest.floor import Look, SettledFloor
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import NO_FLOOR, OpenWriter, Sight

HERE, ELSEWHERE = "here", "elsewhere"
HOT, BAD = "hot", "bad"


class Table:
    """Ids that are visible, one reader of them, and a clock."""

    def __init__(self):
        self.time = 1000.0
        self.metrics = HarvestMetrics()
        self.floor = SettledFloor(self.metrics, lambda: self.time)
        self.rows = {}
        self.held = set()
        self.last_id = 0
        self.writers = frozenset()
        self.place = HERE
        self.unusable = ""
        self.open = {}
        self.looks = self.from_head = 0

    def write(self, *ids, lane=()):
        """These rows become visible."""
        self.rows.update(dict.fromkeys(ids, frozenset(lane)))
        self.last_id = max(self.last_id, *ids)

    def sight(self):
        return Sight(self.last_id, self.place, self.writers, self.unusable)

    def describe(self, writers):
        return [self.open[name] for name in sorted(writers)]

    def read(self, limit=100, left_out=(), took=0.0):
        """One scan; the ids it found."""
        left_out = frozenset(left_out)
        reading = self.floor.begin(left_out)
        look = reading.look(self)
        self.looks += look is not None
        self.from_head += reading.floor is NO_FLOOR
        above = reading.floor.id if reading.floor.place == self.place else NO_FLOOR.id
        found = [
            identity
            for identity, lanes in sorted(self.rows.items(), key=lambda row: row[0])
            if identity > above and identity not in self.held and not lanes & left_out
        ][:limit]
        self.floor.ended(reading, look, [(identity,) for identity in found], took)
        self.held.update(found)
        return found

    def catch_up(self):
        """Two scans with a look each."""
        for _ in range(2):
            self.time += 2
            self.read()

    @property
    def at(self):
        """The floor's id, or None."""
        return self.floor.floor.id if self.floor.floor.place is not None else None


@pytest.fixture
def table():
    """An empty table with a reader who has not looked yet."""
    return Table()


def test_rises_to_what_is_settled_and_seen(table):
    """The floor follows a backlog batch by batch, and ends at the last id drawn."""
    table.write(*range(1, 11))
    table.last_id = 12  # rolled back
    assert [table.read(4), table.at] == [[1, 2, 3, 4], 4]
    assert [table.read(4), table.at] == [[5, 6, 7, 8], 8]
    assert [table.read(4), table.at] == [[9, 10], 10]
    assert [table.read(4), table.at] == [[], 12]


def test_waits_for_every_writer_of_one_look(table):
    """What was drawn before a look is settled once all who were writing then are gone, whoever else writes by then."""
    table.write(1, 3)
    table.writers = frozenset({"x", "y"})
    assert [table.read(), table.at] == [[1, 3], None]
    table.time += 2
    table.writers = frozenset({"y", "z"})
    assert [table.read(), table.at] == [[], None]
    table.time += 2
    table.last_id = 9
    table.writers = frozenset({"z"})
    assert [table.read(), table.at] == [[], 3]
    table.write(2)
    table.time += 2
    assert table.read() == []  # which the database rules out, since y had ended


def test_looks_only_while_there_is_something_to_gain(table):
    """An idle table is not looked at, a busy one once for every thousand rows, a slow one once a second."""
    table.catch_up()
    table.looks = 0
    for _ in range(100):
        table.time += 60
        table.read()
    assert table.looks == 0
    table.write(*range(1, 3001))
    for _ in range(30):
        table.read(100)
    assert table.looks in {2, 3}
    table.looks = 0
    table.write(3001)
    for _ in range(10):
        table.time += 0.5
        table.read()
    assert table.looks in {1, 2}


def test_gone_elsewhere(table):
    """Another connection, or another table of that name: the floor, and what was settled, are forgotten."""
    table.write(1, 2)
    table.catch_up()
    assert table.at == 2
    table.place = ELSEWHERE
    table.held.clear()
    table.write(3)
    assert table.read() == [1, 2, 3]
    assert table.at is None
    table.catch_up()
    assert table.at == 3
    assert table.floor.off == ""


def test_sequence_set_back(table):
    """Ids that come again are not settled."""
    table.write(5)
    table.catch_up()
    table.rows.clear()
    table.last_id = 3
    table.write(4)
    assert table.at == 5
    table.last_id = 4
    table.time += 70
    table.read()
    assert table.at != 5
    table.catch_up()
    assert table.at == 4
    assert table.floor.off == ""


def test_reset_keeps_what_is_settled(table):
    """After a reset one scan from the head is enough, as nothing has changed about ids."""
    table.write(*range(1, 11))
    table.catch_up()
    table.floor.reset("a test")
    table.held.clear()
    table.looks = 0
    assert [table.at, table.read(4), table.at] == [None, [1, 2, 3, 4], 4]
    assert table.looks == 0


def test_reading_that_a_reset_overtook(table):
    """Rows that a reset may have given back prove nothing."""
    table.write(1)
    reading = table.floor.begin(frozenset())
    look = reading.look(table)
    table.floor.reset("a failure meanwhile")
    table.floor.ended(reading, look, [(1,)], 0.0)
    assert table.at is None


def test_lane_that_is_let_in_again(table):
    """The floor goes back to where it was proven without the lane, and not to zero."""
    table.write(1, 2)
    table.catch_up()
    table.write(3, lane=[HOT])
    table.write(4)
    table.read(left_out=[HOT])
    table.time += 2
    table.read(left_out=[HOT])
    assert table.at == 4
    assert [table.read(left_out=[HOT, BAD]), table.at] == [[], 4]
    assert [table.read(), table.at] == [[3], 3]
    assert [table.read(), table.at] == [[], 4]
    assert table.from_head <= 2


def test_lane_that_was_left_out_from_the_beginning(table):
    """Where there never was a floor without the lane there is none once it is let in; other lanes do not matter."""
    table.write(1, lane=[BAD])
    table.write(2)
    table.read(left_out=[BAD])
    table.time += 2
    table.read(left_out=[BAD])
    table.read(left_out=[BAD, HOT])
    assert table.read(left_out=[BAD]) == []
    assert table.at == 2
    assert [table.read(left_out=[HOT]), table.at] == [[1], 1]


def test_row_that_was_left_out_twice_over(table):
    """It was passed by for the sake of one thing; when that is let in it is still left out by the other, and found."""

    def rise(*left_out):
        for _ in range(2):
            table.read(left_out=left_out, took=1e6)  # no look from the head for days
            table.time += 2

    table.write(1)
    rise()
    rise("topic")
    table.write(2, lane=("topic", "key"))
    table.write(3)
    rise("topic")
    rise("topic", "key")
    assert table.at == 3
    assert table.read(left_out=["key"]) == []
    table.write(4)
    rise("key")
    assert table.at == 4
    assert table.read() == [2]


def test_is_looked_after_from_the_head(table):
    """Every 5 s while idle, else every minute, a scan begins at the head; more seldom where that takes long."""
    table.write(1)
    table.catch_up()

    def seconds_between(took):
        table.from_head, began = 0, table.time
        while table.from_head < 3:
            table.time += 0.5
            last = table.last_id
            if busy:
                table.write(last + 1)
            table.read(took=took)
        return (table.time - began) / 3

    busy = False
    assert 4 <= seconds_between(took=0.0) <= 6
    assert 20 <= seconds_between(took=1.0) <= 31
    busy = True
    assert 55 <= seconds_between(took=0.0) <= 65


def test_row_below_the_floor_turns_it_off_for_good(table, caplog):
    """It is found, the log says who is to blame, and no reset or reconnect brings the floor back."""
    table.write(10)
    table.catch_up()
    table.write(7)
    table.time += 6
    assert table.read() == [7]
    table.time += 2
    table.read()
    assert "record 7" in table.floor.off
    assert "draws ids ahead" in caplog.text
    table.floor.reset("a new leader ID")
    table.place = ELSEWHERE
    table.write(20)
    table.catch_up()
    assert table.at is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("place", [HERE, ELSEWHERE])
def test_row_below_the_floor_of_another_place(table, place):
    """A table that was emptied and began anew proves nothing against its clients."""
    table.write(10)
    table.catch_up()
    table.write(7)
    table.time += 6
    reading = table.floor.begin(frozenset())
    table.floor.ended(reading, None, [(7,)], 0.0)
    table.place = place
    table.time += 2
    table.read()
    assert bool(table.floor.off) == (place == HERE)


def test_unusable_ids(table, caplog):
    """A table whose ids prove nothing is read from the head, the log says why, once, and nobody looks again."""
    table.unusable = "the sequence caches"
    table.write(1)
    for _ in range(5):
        table.catch_up()
    assert table.at is None
    assert table.looks == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the sequence caches" in caplog.text


def _stall(table, seconds, **writer):
    table.writers = frozenset({"3/7"})
    about = {"pid": 4711, "gid": None, "age_seconds": 300.0, "application": "shop", "state": "idle in transaction"}
    table.open = {"3/7": OpenWriter("3/7", **(about | writer))}
    table.write(table.last_id + 1)
    for _ in range(int(seconds)):
        table.time += 1
        table.read()


def test_names_a_writer_in_the_way(table, caplog):
    """After ten seconds the log names its pid, age, application and state; again only when it is much older."""
    _stall(table, 9)
    assert not caplog.records
    _stall(table, 40)
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert all(part in text for part in ("4711", "300 s", "shop", "idle in transaction", "pg_terminate_backend(4711)"))
    _stall(table, 60)
    assert len(caplog.records) == 2
    _stall(table, 200)
    assert len(caplog.records) == 2


def test_age_that_we_may_not_know(table, caplog):
    """Without the right to see a session's age, it is at least as old as it has been in the way."""
    _stall(table, 15, age_seconds=0.0, application="", state="")
    assert "open for 1" in caplog.text


def test_names_a_prepared_transaction(table, caplog):
    """It has no process, and is named by its identifier."""
    _stall(table, 15, pid=None, gid="transfer-9")
    assert "'transfer-9'" in caplog.text
    assert "COMMIT PREPARED" in caplog.text


def test_metrics(table):
    """Distance and stragglers are shown while leading, the distance only where there is a floor."""

    def shown(name):
        return table.metrics.registry.get_sample_value(f"outbox_floor_{name}", {"outbox": ""})

    table.write(1, 2)
    table.catch_up()
    assert shown("enabled") is None
    table.metrics.leading(True)
    assert [shown("enabled"), shown("distance_ids"), shown("stragglers")] == [1, 0, 0]
    _stall(table, 4)
    table.last_id = 100
    table.time += 5
    table.read()
    assert [shown("distance_ids"), shown("stragglers")] == [98, 1]
    assert shown("oldest_straggler_seconds") == pytest.approx(8, abs=2)
    table.floor.reset("a test")
    assert shown("distance_ids") is None
    table.unusable = "it descends"
    table.time += 5
    table.read()
    assert shown("enabled") == 0


def test_look_that_arrives_after_the_end(table):
    """Once off, what a reading under way has seen does not matter."""
    reading = table.floor.begin(frozenset())
    table.unusable = "the sequence caches"
    table.read()
    table.floor.ended(reading, Look(Sight(5, HERE, frozenset())), [], 0.0)
    assert table.at is None
