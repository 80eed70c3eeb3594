"""Harvesters that NELI elects: two outboxes on one leader topic, rolling fleets, and event handlers."""

import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from outbox_core.election import now
from outbox_core.errors import GroupRefused
from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.record import OutboxRecord
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import FaultyProducer, Scene, assert_only_adjacent_repeats, wait_until

pytestmark = pytest.mark.real_broker


@pytest.fixture
def scenes(database, kafka_bootstrap):
    """Two outboxes."""
    made = [Scene(database, kafka_bootstrap, table=table) for table in ("outbox", "other")]
    yield made
    for scene in made:
        scene.close()


def test_two_outboxes_on_one_leader_topic(scenes, make_topic, topic_name):
    """Two outboxes with one leader topic and a group each are both published, and no leader is deposed."""
    leader_topic = topic_name("shared-lead")
    topics = [make_topic() for _ in scenes]
    for scene in scenes:
        shared = {"leader_topic": leader_topic, "leader_group_id": topic_name("group")}
        harvester = scene.harvester(elector_factory=None, config=shared)
        harvester.start()
        wait_until(lambda harvester=harvester: harvester.is_leader, "it leads")
    for scene, topic in zip(scenes, topics, strict=True):
        scene.fill(topic, 200)
    for scene in scenes:
        wait_until(lambda scene=scene: scene.count() == 0, f"{scene.table} is empty", timeout=10)
    for scene in scenes:
        [harvester] = scene.harvesters
        assert harvester.kinds() == ["LeaderAcquired"]
        assert harvester.health().ok


def test_equally_named_outbox_of_another_server(scenes, topic_name):
    """A harvester whose group is led from another database server ends, and names both servers and the setting."""
    scene = scenes[0]
    group = {"leader_group_id": topic_name("twins")}
    ours = PostgresStore(scene.database).server_id()
    leader = scene.harvester(elector_factory=None, config=group)
    leader.start()
    wait_until(lambda: leader.is_leader, "it leads")

    class Twin(PostgresStore):
        def server_id(self):
            return "7300000000000000002"

    twin = scene.harvester(elector_factory=None, config=group, store_factory=lambda: Twin(scene.database))
    twin.start()
    with pytest.raises(GroupRefused, match=rf"{ours}, and ours .* 7300000000000000002.*leaderGroupID"):
        twin.join(20)
    assert leader.kinds() == ["LeaderAcquired"]


def test_what_handlers_see(scenes, topic_name):
    """In LeaderAcquired the harvester leads, under the event's ID; in LeaderRevoked and LeaderFenced it does not."""
    seen, matched = [], []

    def look(event):
        seen.append((type(event), harvester.is_leader))
        if isinstance(event, LeaderAcquired):
            assert harvester.leader_id == event.leader_id
            matched.append(event)

    group = {"leader_group_id": topic_name("seen")}
    harvester = scenes[0].harvester(elector_factory=None, on_event=look, config=group)
    harvester.start()
    wait_until(lambda: harvester.is_leader, "it leads")
    ownership = harvester._ctx.elector._member._ownership
    ownership.leadership = replace(ownership.leadership, deadline=now())
    wait_until(lambda: LeaderFenced in [kind for kind, _ in seen], "the lease is over")
    wait_until(lambda: harvester.is_leader, "it leads again")
    harvester.stop()
    assert harvester.join(30)
    assert seen == [
        (LeaderAcquired, True),
        (LeaderFenced, False),
        (LeaderAcquired, True),
        (LeaderRevoked, False),
    ]
    assert len(matched) == 2
    assert harvester.leader_id is None


class Fleet:
    """Harvesters of one outbox that join and leave, and a record of their leadership."""

    def __init__(self, scene, settings):
        self.scene = scene
        self.settings = settings
        self.leading = set()
        self.most_at_once = 0
        self.fenced = []
        self.nodes = []
        self.number = 0

    def join(self):
        number = self.number = self.number + 1

        def note(event):
            if isinstance(event, LeaderAcquired):
                self.leading.add(number)
                self.most_at_once = max(self.most_at_once, len(self.leading))
            elif isinstance(event, LeaderRevoked | LeaderFenced):
                self.leading.discard(number)
            if isinstance(event, LeaderFenced):
                self.fenced.append(event.reason)

        node = self.scene.harvester(
            elector_factory=None,
            on_event=note,
            name=f"{self.scene.table}-{number}",
            config=self.settings,
            limits={"io_error_backoff": "50ms"},
            producer_factory=lambda: FaultyProducer(
                self.scene.config(**self.settings).producer_settings(), refused=0.02, misreported=0.02, seed=number
            ),
        )
        node.start()
        self.nodes.append(node)

    def leave(self):
        node = self.nodes.pop(0)
        node.stop()
        assert node.join(30)


@contextmanager
def writing(scene, topic, seed):
    """Write some hundred records a second, of 20 keys; yield the list of the committed ones."""
    written, enough = [], threading.Event()

    def write():
        chance = random.Random(seed)
        while not enough.wait(0.02):
            batch = [OutboxRecord(topic, f"k{chance.randrange(20)}", str(n)) for n in range(chance.randrange(1, 9))]
            scene.stash(*batch)
            written.extend(batch)

    thread = threading.Thread(target=write)
    thread.start()
    yield written
    enough.set()
    thread.join()


@pytest.mark.complete
def test_rolling_fleets(scenes, make_topic, topic_name):
    """Two fleets on one leader topic roll over under load, with faults: no record is lost or reversed.

    Of each outbox four harvesters join one after the other, then the oldest leaves and another joins, until none of the
    first four is left; at last all leave in the order of joining. 2% of produce calls and of delivery reports fail.
    """
    leader_topic = topic_name("fleets")
    topics = [make_topic(4) for _ in scenes]
    fleets = [Fleet(scene, {"leader_topic": leader_topic, "leader_group_id": topic_name("fleet")}) for scene in scenes]
    with writing(scenes[0], topics[0], 1) as first, writing(scenes[1], topics[1], 2) as second:
        for _ in range(4):
            for fleet in fleets:
                fleet.join()
            time.sleep(1.0)
        for _ in range(4):
            for fleet in fleets:
                fleet.leave()
                fleet.join()
            time.sleep(1.0)
    for scene in scenes:
        wait_until(lambda scene=scene: scene.count() == 0, f"{scene.table} is empty")
    for fleet in fleets:
        while fleet.nodes:
            fleet.leave()
    for scene, fleet, topic, written in zip(scenes, fleets, topics, (first, second), strict=True):
        assert fleet.most_at_once == 1
        assert not [reason for reason in fleet.fenced if "higher claim" in reason]
        messages = scene.read(topic)
        assert len(messages) > len(written), "no report was false"
        assert_only_adjacent_repeats(messages, len(written))
