"""The settled floor on given snapshots and records; tests/integration/stores/test_floor.py proves that it is right."""

import logging

import pytest

from outbox_core.harvest.watermark import Evidence, LowWatermark, _Pace
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import NO_FLOOR, OpenWriter, SequenceSnapshot, StoredRecord

HERE, ELSEWHERE = "here", "elsewhere"
HOT, BAD = "hot", "bad"


def row(identity, key=None):
    """Return a stored record with this id."""
    return StoredRecord(identity, "t", key, None, None, None, -1, 0)


class Table:
    """The visible ids, one reader of them, and a clock."""

    def __init__(self):
        self.time = 1000.0
        self.metrics = HarvestMetrics()
        self.floor = LowWatermark(self.metrics, lambda: self.time)
        self.rows = {}
        self.held = set()
        self.last_id = 0
        self.writers = frozenset()
        self.place = HERE
        self.unusable = ""
        self.open = {}
        self.looks = self.from_head = 0
        self.sequence = self

    def write(self, *ids, lane=()):
        """Make these rows visible."""
        self.rows.update(dict.fromkeys(ids, frozenset(lane)))
        self.last_id = max(self.last_id, *ids)

    def snapshot(self):
        return SequenceSnapshot(self.last_id, self.place, self.writers, self.unusable)

    def describe(self, writers):
        return [self.open[name] for name in sorted(writers)]

    def read(self, limit=100, left_out=(), took=0.0):
        """Scan once; return the ids found."""
        left_out = frozenset(left_out)
        plan = self.floor.plan(left_out)
        evidence = plan.gather(self)
        self.looks += evidence is not None
        self.from_head += plan.floor is NO_FLOOR
        above = plan.floor.id if plan.floor.place == self.place else NO_FLOOR.id
        found = [
            identity
            for identity, lanes in sorted(self.rows.items(), key=lambda row: row[0])
            if identity > above and identity not in self.held and not lanes & left_out
        ][:limit]
        self.floor.scanned(plan, evidence, [row(identity) for identity in found], took)
        self.held.update(found)
        return found

    def give_back(self, *ids, key=None):
        """Let these rows leave the reader's hands, into the table."""
        self.held.difference_update(ids)
        self.floor.went_back([row(identity, key) for identity in ids])

    def catch_up(self):
        """Scan twice, with a snapshot of the sequence each."""
        for _ in range(2):
            self.time += 2
            self.read()

    @property
    def at(self):
        """Return the floor's id, or None."""
        return self.floor.floor.id if self.floor.floor.place is not None else None


@pytest.fixture
def table():
    """Return an empty table whose reader has not scanned yet."""
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
    """Ids drawn before a snapshot are settled once all of its writers are gone, even if others write by then."""
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
    """The sequence is not read while idle, once for every thousand rows while busy, and once a second while slow."""
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
    """On another connection, or another table of that name, the floor and its evidence are forgotten."""
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


def test_sequence_set_back(table, caplog):
    """A sequence that was set back takes the floor down, as its ids come again, and the log tells it once."""
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
    assert caplog.text.count("set back from 5 to 4") == 1


def test_ids_that_a_failover_took_back(table, caplog):
    """A promoted standby that lacks the last ids is told from one that has them all."""
    table.write(5)
    table.catch_up()
    for place, last_id, warnings in (("standby", 5, 0), ("late standby", 3, 1)):
        table.place, table.last_id = place, last_id
        table.write(last_id)
        table.catch_up()
        assert caplog.text.count("outbox-id take new ones for repeats") == warnings


def test_reset_keeps_what_is_settled(table):
    """After a reset one scan from the head is enough, as the ids are as settled as before."""
    table.write(*range(1, 11))
    table.catch_up()
    table.floor.reset("a test")
    table.held.clear()
    table.looks = 0
    assert [table.at, table.read(4), table.at] == [None, [1, 2, 3, 4], 4]
    assert table.looks == 0


def test_scan_that_a_reset_overtook(table):
    """A scan that a reset overtook proves no floor, as its rows may have gone back."""
    table.write(1)
    plan = table.floor.plan(frozenset())
    evidence = plan.gather(table)
    table.floor.reset("a failure meanwhile")
    table.floor.scanned(plan, evidence, [row(1)], 0.0)
    assert table.at is None


def test_rows_that_went_back(table):
    """The floor falls to below the rows that went back, and not to the head."""
    table.write(*range(1, 11))
    table.catch_up()
    table.from_head = 0
    table.give_back(7, 9)
    assert [table.read(), table.at, table.from_head] == [[7, 9], 9, 0]


def test_lowest_of_all_ids_that_went_back(table):
    """Below the lowest id there is no floor but the head."""
    lowest = NO_FLOOR.id + 1
    table.write(lowest, 1)
    table.catch_up()
    table.give_back(lowest)
    assert table.floor.plan(frozenset()).floor is NO_FLOOR


@pytest.mark.parametrize("excluded", [("t", BAD), "t"])
def test_tries_in_vain(table, excluded):
    """A row that is tried again and again, while its key or its topic is left out, leaves the floor where it is."""
    table.write(1, lane=[HOT])
    table.write(2, lane=[excluded])
    table.catch_up()
    for identity in range(3, 6):
        table.give_back(2, key=BAD)
        table.write(identity)
        assert table.read(left_out=[excluded]) == [identity]
        table.time += 2
        assert [table.read(left_out=[excluded]), table.at] == [[], identity]
        table.held.add(2)
    table.give_back(2, key=BAD)
    assert [table.read(), table.at] == [[2], 2]


def test_late_row_below_one_that_went_back(table):
    """A row that appears below one that went back, while their key is left out, is found once the key is let in."""
    key = ("t", BAD)
    table.write(1)
    table.catch_up()
    table.write(3, lane=[key])
    table.writers = frozenset({"x"})  # which has drawn 2
    table.time += 2
    assert [table.read(), table.at] == [[3], 1]
    table.give_back(3, key=BAD)
    assert table.read(left_out=[key]) == []
    table.write(2, lane=[key])
    table.writers = frozenset()
    for identity in (4, 5):
        table.write(identity)
        table.time += 2
        assert table.read(left_out=[key], took=1e6) == [identity]
    assert table.at == 5
    assert [table.read(), table.floor.off] == [[2, 3], ""]


def test_row_that_went_back_during_a_scan(table):
    """A scan that does not see a row which goes back meanwhile raises the floor, and the next begins below the row."""
    table.write(1, 2, 3)
    table.catch_up()
    table.write(4)
    plan = table.floor.plan(frozenset())
    table.give_back(2)
    table.floor.scanned(plan, plan.gather(table), [row(4)], 0.0)
    table.held.add(4)
    assert table.read() == [2]
    assert table.floor.off == ""


def test_scan_that_finds_a_row_which_went_back_meanwhile(table):
    """A row that went back after the scan was planned is no proof against the floor."""
    table.write(1, 2, 3)
    table.catch_up()
    table.time += 60
    plan = table.floor.plan(frozenset())
    assert plan.floor is NO_FLOOR
    table.give_back(2)
    table.floor.scanned(plan, plan.gather(table), [row(2)], 0.0)
    table.held.add(2)
    table.catch_up()
    assert [table.floor.off, table.at] == ["", 3]


def test_lane_that_is_let_in_again(table):
    """An excluded lane that is let in again takes the floor back to its proof without the lane, not to zero."""
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
    """A floor that was never proven without a lane ends once that lane is let in; other lanes do not matter."""
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
    """A row excluded for two reasons is found only once neither holds, though the floor rose over it."""

    def rise(*left_out):
        for _ in range(2):
            table.read(left_out=left_out, took=1e6)  # no scan from the head for days
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
    """A scan begins at the head every 5 s while idle, else every minute, and less often if that takes long."""
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
    seconds_between(took=0.15)
    assert 28 <= seconds_between(took=0.15) <= 31
    busy = True
    assert 55 <= seconds_between(took=0.0) <= 65


def test_head_is_looked_at_soon_after_one_long_wait():
    """The rest after a look grows at most twofold, as one that took long may have waited for a lock; up to an hour."""
    pace, time, rests = _Pace(), 0.0, []
    for took in (25.0, 0.0, *[25.0] * 12, 0.0):
        pace.looked_from_head(time, took)
        due = next(seconds for seconds in range(4_000) if pace.from_head_is_due(time + seconds))
        rests.append(due)
        time += due
    # 60 s, as the table is taken to be busy
    assert rests == [60, 60, 60, 60, 60, 80, 160, 320, 640, 1280, 2560, 3600, 3600, 3600, 60]


def test_row_below_the_floor_turns_it_off_for_good(table, caplog):
    """A row below the floor is found and logged with its cause; neither reset nor reconnect brings the floor back."""
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
    """A row below the floor turns it off, unless the table was emptied and began anew in the meantime."""
    table.write(10)
    table.catch_up()
    table.write(7)
    table.time += 6
    plan = table.floor.plan(frozenset())
    table.floor.scanned(plan, None, [row(7)], 0.0)
    table.place = place
    table.time += 2
    table.read()
    assert bool(table.floor.off) == (place == HERE)


def test_unusable_ids(table, caplog):
    """A table whose ids prove nothing is read from the head; the log says why, once; the sequence is not read again."""
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
    """After ten seconds the log names a writer's pid, age, application and state; again only when it is much older."""
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
    """A session whose age may not be read is at least as old as the time for which it has held the floor."""
    _stall(table, 15, age_seconds=0.0, application="", state="")
    assert "open for 1" in caplog.text


def test_names_a_prepared_transaction(table, caplog):
    """A prepared transaction, which has no process, is named by its identifier."""
    _stall(table, 15, pid=None, gid="transfer-9")
    assert "'transfer-9'" in caplog.text
    assert "COMMIT PREPARED" in caplog.text


def test_metrics(table):
    """Distance and stragglers are shown while leading, the distance only if there is a floor."""

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
    """Evidence of a scan that was under way when the floor was turned off is ignored."""
    plan = table.floor.plan(frozenset())
    table.unusable = "the sequence caches"
    table.read()
    table.floor.scanned(plan, Evidence(SequenceSnapshot(5, HERE, frozenset())), [], 0.0)
    assert table.at is None
