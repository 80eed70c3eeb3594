"""Row level security on the tables of an outbox: a harvester that may be shown less than there is believes nothing."""

import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import psycopg
import pytest

from outbox_core.errors import RightsMissing, RowsHidden
from outbox_core.record import OutboxRecord
from tests.harvesting import GENEROUS_SECONDS, AlwaysLeader, identity_of, wait_until

pytestmark = pytest.mark.real_broker

_ENABLE, _DISABLE = "ALTER TABLE {0} ENABLE ROW LEVEL SECURITY", "ALTER TABLE {0} DISABLE ROW LEVEL SECURITY"


class _Standby(AlwaysLeader):
    """An elector that never leads."""

    def start(self):
        """Lead never."""


@pytest.fixture
def role(scene):
    """A role with the harvester's rights that does not own the tables."""
    on_holds = "GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_hold TO {role}"
    on_sequence = "GRANT SELECT ON SEQUENCE outbox_id_seq TO {role}"
    with scene.role(f"GRANT SELECT, UPDATE, DELETE ON outbox TO {{role}}; {on_sequence}; {on_holds}") as name:
        yield name


@pytest.fixture(params=["at-least-once", "exactly-once"])
def settings(request, scene, role):
    """The settings of a harvester with that role, for each delivery."""
    return {"data_source": psycopg.conninfo.make_conninfo(scene.database, user=role), "delivery": request.param}


@contextmanager
def writing(scene, topic):
    """Stash in the background, ten records of ten keys at once; yield the numbers that were committed by then."""
    stop, numbers = threading.Event(), []

    def write():
        while not stop.is_set():
            first = len(numbers)
            scene.stash(*(OutboxRecord(topic, f"k{n % 10}", str(n)) for n in range(first, first + 10)))
            numbers.extend(range(first, first + 10))
            time.sleep(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield numbers
    finally:
        stop.set()
        writer.join()


def _trouble(harvester):
    return " ".join(outage.describe() for outage in harvester._ctx.outages if outage.is_ongoing)


def assert_in_order(messages, numbers, *, once):
    """Assert that each record arrived, those of a key in order; `once`: and not again."""
    of_key = {}
    for message in messages:
        of_key.setdefault(message.key, []).append(int(message.value))
    for key, values in of_key.items():
        again = [after for before, after in pairwise(values) if after < before]
        assert not again, f"{key} goes back to {again[:5]}"
    assert {number for values in of_key.values() for number in values} == set(numbers)
    assert not once or len(messages) == len(numbers)


def test_rows_that_are_hidden_for_moments(scene, settings, make_topic, caplog):
    """Rows that a policy hides now and then are neither taken for gone nor overtaken, and the log says why it waits."""
    topic = make_topic()
    with scene.running(config=settings):
        with writing(scene, topic) as numbers:
            wait_until(lambda: len(numbers) > 500 and scene.count() < 200, "it publishes")
            for _ in range(6):
                scene.execute(_ENABLE.format("outbox"))
                time.sleep(0.5)
                scene.execute(_DISABLE.format("outbox"))
                time.sleep(0.5)
        wait_until(lambda: scene.count() == 0, "all are published")
    assert_in_order(scene.read(topic), numbers, once=settings["delivery"] == "exactly-once")
    assert "row level security" in caplog.text
    assert "BYPASSRLS" in caplog.text
    assert "ended" not in caplog.text


def test_holds_that_are_hidden_hold_on(scene, settings, make_topic, caplog):
    """A topic stays paused while a policy hides the hold, and nothing else is published; released, all of it is."""
    topic, other = make_topic(), make_topic()
    scene.hold("add", topic, reason="incident")
    with scene.running(config=settings) as harvester:
        scene.fill(topic, 50)
        scene.fill(other, 5)
        wait_until(lambda: scene.count() == 50, "the other topic is published")
        scene.execute(_ENABLE.format("outbox_hold"))
        wait_until(lambda: "table public.outbox_hold has row level security" in caplog.text, "the log tells")
        scene.fill(other, 5)
        time.sleep(2.0)  # holds are read each 0.4 s
        assert scene.count() == 55, "nothing is published while it is not known what is held"
        assert len(harvester.leader_ids) <= 3, "it waits, and does not mark in vain"
        scene.execute(_DISABLE.format("outbox_hold"))
        wait_until(lambda: scene.count() == 50, "the other topic goes on")
        scene.hold("release", topic=topic)
        wait_until(lambda: scene.count() == 0, "the topic goes on")
    assert len(scene.read(topic)) == 50


def test_held_records_that_are_hidden_stay_held(scene, settings, make_topic):
    """Holds of records are not deleted as holds of nothing while a policy hides the records."""
    topic = make_topic()
    scene.fill(topic, 3, keys=None)
    scene.hold("add_record", 2)
    with scene.running(config=settings) as harvester:
        wait_until(lambda: scene.count() == 1, "the others are published")
        scene.execute(_ENABLE.format("outbox"))
        time.sleep(11.0)  # such holds are looked for each 10 s
        assert len(harvester.leader_ids) <= 3, "it waits, and does not mark in vain"
        assert [hold.record_id for hold in scene.held()] == [2]
        scene.execute(_DISABLE.format("outbox"))
        scene.fill(topic, 1)
        wait_until(lambda: scene.count() == 1, "it goes on")
        assert [hold.record_id for hold in scene.held()] == [2]
    assert len(scene.read(topic)) == 3


def test_drain_waits_for_what_is_hidden(scene, settings, make_topic):
    """With `drain` a harvester that stands by does not take a table for empty whose rows a policy hides."""
    scene.fill(make_topic(), 4)
    harvester = scene.harvester(config=settings, drain=True, elector_factory=_Standby)
    harvester.start()
    scene.execute(_ENABLE.format("outbox"))
    assert not harvester.join(2.0), "it ended, and the table is not empty"  # it looks each half second
    scene.execute(_DISABLE.format("outbox"))
    scene.execute("DELETE FROM outbox")
    assert harvester.join(GENEROUS_SECONDS)


@pytest.mark.parametrize("table", ["outbox", "outbox_hold"])
def test_start_is_refused_while_rows_are_hidden(scene, settings, table):
    """A harvester that a policy hides rows from does not start, and the error has table, role and remedy."""
    scene.execute(_ENABLE.format(table))
    harvester = scene.harvester(config=settings)
    with pytest.raises(RowsHidden, match=f"table public.{table} has row level security .it has no policy.") as raised:
        harvester.start()
    assert f"ALTER TABLE public.{table} DISABLE ROW LEVEL SECURITY" in str(raised.value)


def test_deliberate_policies_that_change(scene, settings, role, make_topic, caplog):
    """Policies that hide nothing are harvested under; the moment that one hides rows, nothing more is believed."""
    topic = make_topic()
    scene.execute(_ENABLE.format("outbox"))
    scene.execute(f'CREATE POLICY harvester ON outbox TO "{role}" USING (true) WITH CHECK (true)')
    with scene.running(config=settings):
        with writing(scene, topic) as numbers:
            wait_until(lambda: len(numbers) > 300 and scene.count() < 200, "it publishes")
            assert "row level security" not in caplog.text
            for _ in range(4):
                scene.execute("ALTER POLICY harvester ON outbox USING (id % 3 = 0)")
                time.sleep(0.5)
                scene.execute("ALTER POLICY harvester ON outbox USING (true)")
                time.sleep(0.5)
                scene.execute("DROP POLICY harvester ON outbox")
                time.sleep(0.5)
                scene.execute(f'CREATE POLICY harvester ON outbox TO "{role}" USING (true) WITH CHECK (true)')
                time.sleep(0.5)
        wait_until(lambda: scene.count() == 0, "all are published")
    assert_in_order(scene.read(topic), numbers, once=settings["delivery"] == "exactly-once")
    assert "table public.outbox has row level security" in caplog.text


@pytest.mark.parametrize("right", ["SELECT", "DELETE", "UPDATE"])
def test_right_that_is_revoked_for_a_while(scene, settings, role, make_topic, right):
    """A right that is revoked in mid-run is an outage that names the GRANT; with it back the harvester goes on."""
    if (settings["delivery"], right) == ("exactly-once", "UPDATE"):
        pytest.skip("exactly once marks nothing")
    topic = make_topic()
    with scene.running(config=settings) as harvester:
        scene.fill(topic, 20)
        wait_until(lambda: scene.count() == 0, "it publishes")
        scene.execute(f'REVOKE {right} ON outbox FROM "{role}"')
        scene.fill(topic, 20)
        wait_until(lambda: "permission denied for table outbox" in _trouble(harvester), "health tells")
        assert "`outbox schema --grants` prints what it needs" in _trouble(harvester)
        time.sleep(1.0)
        assert harvester.is_leader
        scene.execute(f'GRANT {right} ON outbox TO "{role}"')
        wait_until(lambda: scene.count() == 0, "it goes on")
    identities = [identity_of(message) for message in scene.read(topic)]
    assert sorted(set(identities)) == list(range(1, 41))
    assert settings["delivery"] == "at-least-once" or len(identities) == 40


def test_missing_right_refuses_the_start(scene, settings, role):
    """A harvester without a right does not start."""
    scene.execute(f'REVOKE DELETE ON outbox FROM "{role}"')
    with pytest.raises(RightsMissing, match="GRANT SELECT, DELETE"):
        scene.harvester(config=settings).start()
