"""An embedded harvester whose process ends without `stop`, and `join` of one that cannot end well."""

import subprocess
import sys
import threading

import pytest

from tests.harvesting import AlwaysLeader, harvest_threads, wait_until

_PROGRAM = """
import sys, threading, time
from datetime import timedelta
from outbox_core.config import HarvestConfig, Limits
from outbox_core.harvest import Harvester

data_source, bootstrap, delivery, ending = sys.argv[1:]
harvester = Harvester(
    HarvestConfig(
        data_source=data_source,
        base_kafka_config={"bootstrap.servers": bootstrap},
        delivery=delivery,
        # Patience for a machine that is busy: the end of the process waits that much longer.
        limits=Limits(mark_query_records=200, drain_timeout=timedelta(seconds=60)),
    ),
    lambda event: print(type(event).__name__, flush=True),
)
harvester.start()
while not harvester.in_flight_records:
    time.sleep(0.001)
if ending == "raises":
    raise SystemExit("the application has failed")
if ending == "joined":
    threading.Thread(target=harvester.join, daemon=True).start()
"""


@pytest.mark.real_broker
@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
@pytest.mark.parametrize("ending", ["returns", pytest.param("raises", marks=pytest.mark.complete), "joined"])
def test_process_that_just_ends_stops_its_harvester(scene, make_topic, delivery, ending):
    """If the main thread returns or raises without `stop()`, leadership is handed back and no row stays marked."""
    topic = make_topic()
    scene.fill(topic, 20_000, keys=1)
    program = [sys.executable, "-c", _PROGRAM, scene.database, scene.bootstrap, delivery, ending]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == (1 if ending == "raises" else 0)
    assert ran.stderr == ("the application has failed\n" if ending == "raises" else "")
    assert ran.stdout.split()[-1] == "LeaderRevoked"
    assert scene.count("leader_id IS NOT NULL") == 0
    left = scene.count()
    assert left > 0, "it ended by itself"
    assert len({message.value for message in scene.read(topic)}) == 20_000 - left


class _ElectorThatCannotStop(AlwaysLeader):
    """An elector that raises when it hands leadership back."""

    def stop(self):
        raise RuntimeError("cannot leave")


def test_elector_that_fails_to_stop_holds_nobody_up(scene):
    """`join` raises the elector's error, and no thread of the harvester is left."""
    before = threading.enumerate()  # other tests' may be there still
    harvester = scene.harvester(elector_factory=_ElectorThatCannotStop)
    harvester.start()
    harvester.stop()
    with pytest.raises(RuntimeError, match="cannot leave"):
        harvester.join(20)
    wait_until(lambda: not harvest_threads(besides=before), "its threads have ended")
    assert not harvester.health().ok


def test_first_error_counts(scene):
    """A later error does not hide the error that ended the harvester."""

    class Failing(_ElectorThatCannotStop):
        failure = ValueError("the election has failed")

    harvester = scene.harvester(elector_factory=Failing)
    harvester.start()
    with pytest.raises(ValueError, match="the election has failed"):
        harvester.join(20)


def test_harvesters_that_end_leave_no_thread(scene):
    """Starting and ending harvesters, also from other threads than the main one, leaves no thread behind."""
    before = threading.enumerate()  # other tests' may just be ending

    def start_and_stop():
        harvester = scene.harvester()
        harvester.start()
        harvester.stop()
        harvester.join(20)

    for _ in range(3):
        thread = threading.Thread(target=start_and_stop)
        thread.start()
        thread.join()
    wait_until(lambda: not harvest_threads(besides=before), "their threads have ended")
