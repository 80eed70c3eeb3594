"""NELI on a broker: leaders, hand-overs and fences, and their timing.

Tests that wait for a failure have leases of 1.5 s and sessions of 2.2 s, which the test broker allows ("quick").
"""

import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from devstack.embedded import EmbeddedBroker
from devstack.frame_proxy import Api, Match
from devstack.kafka import KafkaBroker
from outbox_core.election import Neli, NeliConfig, connection_log, now
from outbox_core.election.member import Member
from outbox_core.election.messages import Claim, Heartbeat, Resignation, decode, encode
from outbox_core.election.protocol import Ownership
from outbox_core.errors import GroupRefused, InvalidConfig, KafkaUnavailable, LeaderTopicError, OutboxError
from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.kafka.admin import Inquiry, check_connection
from outbox_core.kafka.topics import ensure_leader_topic
from tests.kafka_reader import read_topic
from tests.resources import assert_released, held, reference_counts_only, times
from tests.topic_settings import alter_topic

LEASE = 1.5
pytestmark = pytest.mark.real_broker


def until(condition, timeout=15.0, what=None):
    """Wait until `condition()` is true; return its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, what or "it did not happen in time"
        time.sleep(0.002)
    return value


class Contender(Neli):
    """An elector that keeps its events and their times."""

    def __init__(self, config, on_event=None):
        super().__init__(config, self.keep)
        self.events = []
        self.inner = on_event

    def keep(self, event):
        self.events.append((now(), event))
        if self.inner is not None:
            self.inner(event)

    def times(self, kind):
        return [at for at, event in self.events if isinstance(event, kind)]

    def kinds(self):
        return [type(event) for _, event in self.events]


@pytest.fixture
def contend(kafka_bootstrap, topic_name):
    """A factory for started contenders of one group, stopped afterwards."""
    group = topic_name("leaders")
    made = []

    def make(*, start=True, quick=False, kafka=None, on_event=None, bootstrap=None, **settings):
        servers = {"bootstrap.servers": bootstrap or kafka_bootstrap}
        if quick:
            servers["session.timeout.ms"] = 2200
            settings["heartbeat_timeout"] = timedelta(seconds=LEASE)
        settings = {"group_id": group, "name": f"c{len(made)}"} | settings
        contender = Contender(NeliConfig(kafka=servers | (kafka or {}), **settings), on_event)
        made.append(contender)
        if start:
            contender.start()
        return contender

    yield make
    stoppers = [threading.Thread(target=contender.stop) for contender in made]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        stopper.join()


@pytest.fixture
def proxy(kafka):
    """A proxy before the broker that can be cut."""
    with kafka.proxied(1) as way:
        yield way


def leads(contender):
    """Wait until the contender leads; return it."""
    until(lambda: contender.is_leader, what=f"never led; {contender.events}, {contender.failure}")
    return contender


def leads_undisturbed(contender, seconds):
    """Assert for some seconds that the contender leads under one leader ID."""
    leader_id = contender.leadership.leader_id
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert contender.is_leader
        assert contender.leadership.leader_id == leader_id
        time.sleep(0.01)


def test_one_leader_of_eight(contend):
    """Of eight contenders exactly one leads, also while leaders stop one after the other."""
    contenders = [contend() for _ in range(8)]
    for remaining in range(8, 5, -1):
        assert len(contenders) == remaining
        leader = until(lambda: next((c for c in contenders if c.is_leader), None))
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            assert [c for c in contenders if c.is_leader] == [leader]
            time.sleep(0.005)
        leader.stop()
        contenders.remove(leader)


def test_group_whose_partition_belongs_to_no_member(contend, monkeypatch):
    """A group that Kafka finds in order, but whose members got no partition, has a leader once it is joined anew."""
    take, given = Member._on_assign, []

    def lose_the_first(member, consumer, partitions):
        given.append(partitions)
        if len(given) > 1:
            take(member, consumer, partitions)
        else:
            consumer.incremental_assign(partitions)

    monkeypatch.setattr(Member, "_on_assign", lose_the_first)
    contender = contend(quick=True)
    until(lambda: given, what="it has joined")
    leads(contender)
    assert len(given) == 2


def test_request_to_join_that_is_lost_with_its_connection(contend, kafka):
    """A standby that waits for its answer in vain asks again over another connection, long before the client would."""
    leader = leads(contend(quick=True))
    with kafka.frame_proxied(2) as way:
        lost = way.hold(Match(Api.JOIN_GROUP), reset=False)
        standby = contend(quick=True, bootstrap=way.bootstrap)
        assert lost.wait_until_held(15)
        leader.stop()
        until(lambda: standby.is_leader, timeout=30, what="it never led")


def another_leader_writes(config, *, resigns):
    """Write what a leader of the group writes before it is cut off, or before it stops; return when it was done."""
    producer = Producer({"bootstrap.servers": config.kafka["bootstrap.servers"]})
    offsets = []

    def write(signal):
        producer.produce(config.topic, encode(signal), partition=0, on_delivery=lambda _, sent: offsets.append(sent))
        producer.flush()

    claim = Claim(uuid.uuid4(), "another", config.contest)
    write(claim)
    term = offsets[0].offset()
    for number in range(3):
        write(Heartbeat(term, claim.id, number, "another", config.contest))
    if resigns:
        write(Resignation(term, claim.id, "another", config.contest))
    return now()


def test_lease_that_may_still_run_is_waited_for(contend):
    """The partition's new owner leads only once the lease of whoever wrote to the topic before is over for certain."""
    contender = contend(start=False, quick=True)
    ensure_leader_topic(contender._config.kafka, contender._config.topic)
    written = another_leader_writes(contender._config, resigns=False)
    contender.start()
    leads(contender)
    assert contender.times(LeaderAcquired)[0] >= written + LEASE


def test_resignation_spares_the_wait(contend):
    """A leader that stops resigns, and its successor takes its word for it."""
    contender = contend(start=False)
    ensure_leader_topic(contender._config.kafka, contender._config.topic)
    another_leader_writes(contender._config, resigns=True)
    contender.start()
    leads(contender).stop()
    config = contender._config
    messages = read_topic(config.kafka["bootstrap.servers"], config.topic)
    signals = [decode(message.value) for message in messages]
    [first, last] = [signal for signal in signals if isinstance(signal, Resignation)]
    assert last == signals[-1]
    assert first.claim < last.claim


@pytest.mark.complete
def test_joining_standbys_do_not_move_leadership(contend):
    """A leader keeps leading under the same ID while others join and leave."""
    leader = leads(contend())
    standbys = []
    for _ in range(3):
        standbys.append(contend())
        leads_undisturbed(leader, 0.5)
    for standby in standbys:
        standby.stop()
        leads_undisturbed(leader, 0.3)
    assert leader.kinds() == [LeaderAcquired]


def test_cut_off_leader_is_fenced_before_a_successor(contend, proxy, topic_name):
    """A leader cut off at any moment between two group heartbeats stops before a successor is elected.

    Six groups with the slowest group heartbeat allowed, whose leaders joined at different times: one cut meets each at
    another moment of its 500 ms.
    """
    slowest = {"heartbeat.interval.ms": 500, "session.timeout.ms": int(LEASE * 1000) + 1000}
    groups = [topic_name("cut") for _ in range(6)]
    leaders = []
    for group in groups:
        leaders.append(leads(contend(quick=True, group_id=group, kafka=slowest, bootstrap=proxy.bootstrap)))
        time.sleep(0.583)  # a sixth of 500 ms further on the beat
    standbys = [contend(quick=True, group_id=group, kafka=slowest) for group in groups]
    time.sleep(1.0)
    until(lambda: all(leader.is_leader for leader in leaders))
    assert [standby.events for standby in standbys] == [[]] * len(groups)
    proxy.cut()
    cut_at = now()
    for leader, standby in zip(leaders, standbys, strict=True):
        leads(standby)
        assert not leader.is_leader
        fenced = leader.times(LeaderFenced)[-1]
        elected = standby.times(LeaderAcquired)[0]
        print(f"fenced {fenced - cut_at:.3f} s and succeeded {elected - cut_at:.3f} s after the cut")  # noqa: T201
        assert cut_at < fenced < cut_at + LEASE + 0.5
        assert fenced < elected
    proxy.restore()
    time.sleep(1.0)
    for leader, standby in zip(leaders, standbys, strict=True):
        assert standby.is_leader
        assert leader.times(LeaderFenced)[-1] > leader.times(LeaderAcquired)[-1]


def test_a_leader_that_is_back_in_time_leads_again(contend, proxy):
    """Cut off for longer than the lease but not the session, the owner is fenced once and leads again with a new ID."""
    leader = leads(contend(quick=True, bootstrap=proxy.bootstrap, kafka={"session.timeout.ms": 10_000}))
    proxy.cut()
    until(lambda: leader.times(LeaderFenced))
    time.sleep(0.5)
    proxy.restore()
    leads(leader)
    assert leader.kinds() == [LeaderAcquired, LeaderFenced, LeaderAcquired]
    first, _, second = [event for _, event in leader.events]
    assert first.leader_id != second.leader_id
    assert first.term == second.term


def test_a_lost_broker_is_logged_once(contend, proxy, caplog):
    """A broker that refuses connections is one warning and its return one line; leadership resumes by itself."""
    caplog.set_level(logging.INFO, logger="outbox_core.election")
    leader = leads(contend(quick=True, bootstrap=proxy.bootstrap))
    proxy.reset()
    until(lambda: leader.times(LeaderFenced))
    time.sleep(2.0)
    proxy.resume()
    until(lambda: leader.is_leader and "is back" in caplog.text)
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if "no Kafka broker" in line]) == 1
    assert len([line for line in messages if "is back" in line]) == 1


def test_wide_leader_topic_warns(contend, make_topic, caplog):
    """A leader topic with four partitions is a warning, and one of four contenders still leads."""
    topic = make_topic(4)
    contenders = [contend(topic=topic) for _ in range(4)]
    assert [record.levelname for record in caplog.records if "4 partitions" in record.getMessage()] == ["WARNING"] * 4
    until(lambda: any(c.is_leader for c in contenders))
    end = time.monotonic() + 2.0
    led = 0
    while time.monotonic() < end:
        leaders = sum(c.is_leader for c in contenders)
        assert leaders <= 1
        led += leaders
        time.sleep(0.005)
    assert led > 0
    until(lambda: sum(c.is_leader for c in contenders) == 1)  # leadership may be moving at this moment


def test_role_chooses_the_partition(contend, make_topic, kafka_bootstrap):
    """Role 5 of a topic of four partitions is partition 1."""
    topic = make_topic(4)
    leads(contend(topic=topic, role=5))
    assert {message.partition for message in read_topic(kafka_bootstrap, topic)} == {1}


def test_leader_topic_is_made_narrow(contend, kafka_bootstrap):
    """The leader topic appears with one partition, although the broker's default is four."""
    leader = leads(contend())
    topic = f"{leader._config.group_id}.neli"
    assert ensure_leader_topic({"bootstrap.servers": kafka_bootstrap}, topic) == 1


def test_foreign_messages_are_ignored_but_a_higher_claim(contend, kafka_bootstrap):
    """Garbage, foreign and lower signals do not depose a leader; a higher claim does, until that rival is silent."""
    leader = leads(contend(quick=True))
    first = leader.leadership
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "linger.ms": 0})
    topic = leader._config.topic

    def say(value):
        producer.produce(topic, value if isinstance(value, bytes) else json.dumps(value).encode(), partition=0)
        assert producer.flush(5) == 0

    rival = str(uuid.uuid4())
    beat = {"type": "heartbeat", "id": rival, "sequence": 1, "name": "stranger"}
    for value in (b"", b"\xff\x00garbage", b"[]", {"type": "claim"}, beat | {"claim": first.term - 1}):
        say(value)
    for value in (beat | {"claim": first.term}, beat | {"claim": first.term + 1}, beat | {"claim": 10**12}):
        say(value)
    leads_undisturbed(leader, 0.5)

    say({"type": "claim", "id": rival, "name": "rival"})
    deposed = until(lambda: leader.times(LeaderFenced))[0]
    assert not leader.is_leader
    claim = read_topic(kafka_bootstrap, topic)[-1].offset
    for number in range(6):
        say(beat | {"claim": claim, "sequence": number})
        time.sleep(LEASE / 4)
        assert not leader.is_leader
    silent_since = now()
    leads(leader)
    assert leader.times(LeaderAcquired)[-1] >= silent_since + LEASE - LEASE / 4 - 0.1
    assert leader.leadership.term > claim
    assert leader.leadership.leader_id != first.leader_id
    assert deposed < silent_since


def test_nobody_leads_by_others_heartbeats(contend, proxy, kafka_bootstrap):
    """A leader that cannot write is fenced although others' heartbeats arrive on the topic."""
    leader = leads(contend(quick=True))
    leader._member._producer = Producer({"bootstrap.servers": proxy.bootstrap})
    proxy.cut()
    busy = Producer({"bootstrap.servers": kafka_bootstrap, "linger.ms": 0})
    beat = {"type": "heartbeat", "id": str(uuid.uuid4()), "sequence": 1, "name": "x", "claim": leader.leadership.term}
    until(lambda: busy.produce(leader._config.topic, json.dumps(beat), partition=0) or not leader.is_leader, timeout=3)
    until(lambda: leader.kinds() == [LeaderAcquired, LeaderFenced])
    busy.purge()
    busy.flush(1)


def test_blocked_task_neither_keeps_nor_loses_leadership(contend, proxy):
    """While the background task is blocked the lease is renewed, and still ends on time after a cut."""
    blocked, go_on = threading.Event(), threading.Event()

    def task():
        blocked.set()
        go_on.wait(20)

    leader = contend(quick=True, bootstrap=proxy.bootstrap).background(task)
    assert blocked.wait(10)
    leads_undisturbed(leader, 1.5 * LEASE)
    proxy.cut()
    until(lambda: not leader.is_leader, timeout=LEASE + 0.3)
    until(lambda: leader.times(LeaderFenced), timeout=0.5)
    go_on.set()
    proxy.restore()


def test_lease_ends_while_the_handler_blocks(contend):
    """An elector whose handler blocks stops leading at the deadline, and reports it once the handler returns."""
    release = threading.Event()
    seen = []

    def block_once(event):
        if isinstance(event, LeaderAcquired) and not seen:
            seen.append(event)
            release.wait(20)

    leader = leads(contend(quick=True, on_event=block_once, kafka={"session.timeout.ms": 6000}))
    deadline = leader.leadership.deadline
    until(lambda: not leader.is_leader)
    assert deadline <= now() < deadline + 0.3
    assert leader.kinds() == [LeaderAcquired]
    release.set()
    leads(leader)
    assert leader.kinds() == [LeaderAcquired, LeaderFenced, LeaderAcquired]
    assert leader.leadership.leader_id != seen[0].leader_id


def test_stop_hands_over_at_once(contend):
    """After a stop a successor leads in a fraction of a second."""
    current = leads(contend())
    took = []
    for _ in range(3):
        successor = contend()
        time.sleep(1.6)  # librdkafka joins at most once a second
        asked = time.monotonic()
        current.stop()
        leads(successor)
        took.append(time.monotonic() - asked)
        current = successor
    print("hand-over took", [f"{seconds * 1000:.0f} ms" for seconds in took])  # noqa: T201
    assert min(took) < 0.5
    assert max(took) < 3


def test_standby_that_stops_leaves_the_group(contend, kafka_bootstrap):
    """A standby that was stopped is not waited for: neither by a new member nor by the leader's successor."""
    leader, standby = leads(contend()), contend()
    group = leader._config.group_id
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})

    def members():
        return len(admin.describe_consumer_groups([group])[group].result(30).members)

    until(lambda: members() == 2)
    time.sleep(1.6)  # so that both have joined, in a generation that is settled
    standby.stop()
    until(lambda: members() == 1, timeout=3.0)  # a session would be 6 s
    leads_undisturbed(leader, 1.0)


def test_revoked_handler_is_the_barrier(contend):
    """No successor is elected while LeaderRevoked's handler works; it sees the lease, but not a leader."""
    readings = []

    def drain(event):
        if isinstance(event, LeaderRevoked):
            readings.append((leader.is_leader, leader.leadership.leader_id == event.leader_id))
            time.sleep(1.5 * LEASE)
            readings.append((leader.is_leader, successor.is_leader))
            drained.append(now())

    drained = []
    leader = leads(contend(quick=True, on_event=drain))
    successor = contend()
    time.sleep(0.5)
    leader.stop()
    assert readings == [(False, True), (False, False)]
    assert leader.leadership is None
    leads(successor)
    assert drained[0] < successor.times(LeaderAcquired)[0]
    assert leader.kinds() == [LeaderAcquired, LeaderRevoked]


def test_rebalance_hands_over(contend, make_topic):
    """A rebalance that takes the partition away is a LeaderRevoked, with the same barrier."""
    topic = make_topic(2)
    drained = []

    def drain(event):
        if isinstance(event, LeaderRevoked):
            time.sleep(0.3)
            drained.append(now())

    first = leads(contend(topic=topic, on_event=drain))
    second = leads(contend(topic=topic))  # it is given the partition that decides
    assert first.kinds() == [LeaderAcquired, LeaderRevoked]
    assert drained[0] < second.times(LeaderAcquired)[0]


def test_task_runs_only_while_leading(contend):
    """Only the leader calls its background task, again and again, and a hand-over waits for the present call."""
    calls = []

    def work(name):
        calls.append((name, "begin"))
        time.sleep(0.05)
        calls.append((name, "end"))

    first = contend()
    leads(first.background(functools.partial(work, "first")))
    second = contend().background(functools.partial(work, "second"))
    until(lambda: len(calls) > 6)
    first.stop()
    until(lambda: ("second", "end") in calls)
    names = [name for name, _ in calls]
    assert names == sorted(names)
    assert all(calls[i][1] == "begin" and calls[i + 1][1] == "end" for i in range(0, names.count("first"), 2))
    second.stop()
    second.join(5)


def test_failing_task_hands_over(contend):
    """An error of a task ends its elector: leadership is handed over, and `join` raises the error."""

    def fail():
        raise ZeroDivisionError

    failing = contend().background(fail)
    with pytest.raises(ZeroDivisionError):
        failing.join(10)
    assert isinstance(failing.failure, ZeroDivisionError)
    assert failing.kinds() == [LeaderAcquired, LeaderRevoked]
    leads(contend())


def test_stop_from_inside(contend):
    """A task may stop its own elector."""
    elector = contend(start=False)
    elector.background(elector.stop).join(10)
    assert elector.kinds() == [LeaderAcquired, LeaderRevoked]
    with pytest.raises(OutboxError):
        elector.start()


def test_stop_does_not_wait_for_an_absent_broker(contend, proxy):
    """A stop ends within some seconds although the broker does not answer."""
    leader = leads(contend(bootstrap=proxy.bootstrap))
    proxy.cut()
    asked = time.monotonic()
    leader.stop()
    took = time.monotonic() - asked
    print(f"stop without a broker took {took:.1f} s")  # noqa: T201
    assert took < 9
    assert not leader._thread.is_alive()
    assert leader.kinds() == [LeaderAcquired, LeaderRevoked]


def test_unreachable_broker(contend, monkeypatch):
    """An unreachable broker is KafkaUnavailable from `start`, with the address."""
    monkeypatch.setattr("outbox_core.kafka.topics.Inquiry", functools.partial(Inquiry, timeout_seconds=1.0))
    elector = contend(start=False, bootstrap="127.0.0.1:9")
    with pytest.raises(KafkaUnavailable, match=r"127\.0\.0\.1:9"):
        elector.start()
    with pytest.raises(KafkaUnavailable, match="refused"):
        check_connection({"bootstrap.servers": "127.0.0.1:9"}, timeout_seconds=1.0)


def test_unknown_setting(contend):
    """An unknown setting is InvalidConfig from `start`, with its name."""
    with pytest.raises(InvalidConfig, match=r"no\.such\.setting"):
        contend(kafka={"no.such.setting": "1"})


def test_illegal_leader_topic(kafka_bootstrap):
    """A leader topic that the broker refuses to make is a LeaderTopicError with the broker's reason."""
    with pytest.raises(LeaderTopicError, match="cannot be made"):
        ensure_leader_topic({"bootstrap.servers": kafka_bootstrap}, "no spaces")


def test_group_with_other_assignors(contend, topic_name, kafka_bootstrap):
    """A group whose members have other assignors, as goharvest's do, ends the elector with GroupRefused."""
    group = topic_name("go")
    member = Consumer(
        {"bootstrap.servers": kafka_bootstrap, "group.id": group, "partition.assignment.strategy": "range"}
    )
    ensure_leader_topic({"bootstrap.servers": kafka_bootstrap}, f"{group}.neli")
    member.subscribe([f"{group}.neli"])
    until(lambda: member.poll(0.1) or member.assignment())
    try:
        refused = contend(group_id=group)
        with pytest.raises(GroupRefused, match=group):
            refused.join(10)
        assert isinstance(refused.failure, GroupRefused)
        refused.stop()
    finally:
        member.close()


def test_electors_leave_nothing_behind(topic_name, kafka_bootstrap):
    """Electors that were refused, or that led and stopped, leave no thread or descriptor.

    No garbage is collected meanwhile. With OUTBOX_TEST_LEAKS=1 there are 200 repetitions.
    """
    compacted, go = topic_name("compacted"), topic_name("go")
    ensure_leader_topic({"bootstrap.servers": kafka_bootstrap}, compacted)
    ensure_leader_topic({"bootstrap.servers": kafka_bootstrap}, f"{go}.neli")
    alter_topic(kafka_bootstrap, compacted, {"max.message.bytes": "200"})
    settings = {"bootstrap.servers": kafka_bootstrap, "group.id": go, "partition.assignment.strategy": "range"}
    member = Consumer(settings)
    member.subscribe([f"{go}.neli"])
    until(lambda: member.poll(0.1) or member.assignment())

    def refused_at_the_start():
        with pytest.raises(LeaderTopicError):
            Neli(NeliConfig(kafka={"bootstrap.servers": kafka_bootstrap}, group_id=compacted, topic=compacted)).start()

    def refused_by_the_group():
        elector = Neli(NeliConfig(kafka={"bootstrap.servers": kafka_bootstrap}, group_id=go))
        elector.start()
        with pytest.raises(GroupRefused):
            elector.join(10)
        elector.stop()

    group = topic_name("alone")

    def led():
        elector = Neli(NeliConfig(kafka={"bootstrap.servers": kafka_bootstrap}, group_id=group))
        with elector:
            until(lambda: elector.is_leader)

    lives = [refused_at_the_start, refused_by_the_group, led]
    for live in lives:
        live()  # makes topics, which later calls find
    try:
        with reference_counts_only():
            before = held()
            for _ in range(times(3, 200)):
                for live in lives:
                    live()
            after = assert_released(before)
    finally:
        member.close()
    assert after.memory_mib - before.memory_mib < 40  # malloc's arenas, of which each new thread may take another


def test_lost_connections_leave_nothing_behind(contend, proxy):
    """An elector that loses its connections again and again leaks no thread or descriptor, as leader or as standby."""
    members = [leads(contend(bootstrap=proxy.bootstrap)), contend(bootstrap=proxy.bootstrap)]
    until(lambda: members[1]._member._health.has_heard)

    def lose():
        lost_at = now()
        proxy.reset()
        proxy.resume()
        until(lambda: all(member._member._health.heard_at > lost_at for member in members), timeout=30)

    lose()
    with reference_counts_only():
        before = held()
        for _ in range(times(5, 100)):  # each time some six connections
            lose()
        after = assert_released(before)
    assert after.memory_mib - before.memory_mib < 20
    assert [member.failure for member in members] == [None, None]


def test_session_beyond_the_brokers_bounds(contend):
    """A session timeout that the broker refuses ends the elector with an error that names the setting."""
    with pytest.raises(InvalidConfig, match=r"session\.timeout\.ms"):
        contend(heartbeat_timeout=timedelta(minutes=31)).join(10)


@pytest.fixture(scope="module")
def strict_broker(tmp_path_factory):
    """A broker that denies every user rights on `denied-*` names, and the making of topics."""
    broker = KafkaBroker(
        tmp_path_factory.mktemp("strict"),
        small=True,
        extra_properties={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
        },
    )
    broker.start()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for topic in ("denied-writing.neli", "group-topic"):
        assert ensure_leader_topic({"bootstrap.servers": broker.bootstrap}, topic) == 1

    def rule(kind, name, pattern, operation, permission=AclPermissionType.DENY):
        return AclBinding(kind, name, pattern, "User:*", "*", operation, permission)

    literal, prefixed = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
    cluster = functools.partial(rule, ResourceType.BROKER, "kafka-cluster", literal)
    rules = [
        rule(ResourceType.TOPIC, "denied-writing", prefixed, AclOperation.WRITE),
        rule(ResourceType.TOPIC, "denied-writing", prefixed, AclOperation.READ, AclPermissionType.ALLOW),
        rule(ResourceType.TOPIC, "denied-making", prefixed, AclOperation.CREATE),
        rule(ResourceType.GROUP, "denied-group", prefixed, AclOperation.READ),
        cluster(AclOperation.ALL, AclPermissionType.ALLOW),
        cluster(AclOperation.CREATE),
    ]
    for future in admin.create_acls(rules).values():
        future.result(10)
    yield broker
    broker.stop()


def test_groups_share_a_leader_topic(contend, topic_name):
    """Two groups on one leader topic do not disturb each other, not even by a hand-over."""
    topic = topic_name("shared")
    first = leads(contend(topic=topic, group_id=topic_name("first")))
    second = leads(contend(topic=topic, group_id=topic_name("second")))
    leads_undisturbed(first, 1.0)
    second.stop()
    third = leads(contend(topic=topic, group_id=second._config.group_id))
    leads_undisturbed(first, 0.5)
    assert third.is_leader
    assert first.kinds() == [LeaderAcquired]
    assert first.trouble is None
    assert third.trouble is None


def test_deposed_owner_is_back_although_others_write(contend, topic_name, kafka_bootstrap, monkeypatch):
    """A deposed owner claims again once its rival is silent, although another group keeps writing to the topic."""
    topic = topic_name("busy")
    leader = leads(contend(quick=True, topic=topic))
    monkeypatch.setattr(
        "outbox_core.election.member._LONGEST_WAIT_SECONDS", 1.0
    )  # longer than any pause of the other group
    monkeypatch.setattr(Ownership, "wait_seconds", lambda *_: 1.0)
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "linger.ms": 0})
    group = leader._config.group_id
    rival = {"type": "claim", "id": str(uuid.uuid4()), "name": "rival", "group": group}
    other = {"type": "heartbeat", "claim": 0, "id": str(uuid.uuid4()), "sequence": 1, "name": "other", "group": "other"}
    producer.produce(topic, json.dumps(rival), partition=0)
    until(lambda: leader.times(LeaderFenced))

    def is_back():
        producer.produce(topic, json.dumps(other), partition=0)
        producer.poll(0.005)
        return leader.is_leader

    until(is_back, timeout=5 * LEASE)


def test_what_a_handler_sees(contend):
    """In LeaderAcquired this process leads, under the event's ID; in LeaderRevoked and LeaderFenced it does not."""
    seen = []

    def look(event):
        lease = contender.leadership
        seen.append((type(event), contender.is_leader, lease is not None and lease.leader_id == event.leader_id))

    contender = contend(quick=True, on_event=look, start=False)
    contender.start()
    leads(contender)
    contender._member._ownership.leadership = replace(contender.leadership, deadline=now())
    until(lambda: contender.times(LeaderFenced))
    leads(contender)
    contender.stop()
    assert seen == [
        (LeaderAcquired, True, True),
        (LeaderFenced, False, False),
        (LeaderAcquired, True, True),
        (LeaderRevoked, False, True),
    ]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"cleanup.policy": "compact"}, r"cleanup\.policy=compact"),
        ({"max.message.bytes": "200"}, r"max\.message\.bytes"),
    ],
)
def test_leader_topic_that_refuses(contend, topic_name, kafka_bootstrap, settings, advice):
    """A leader topic that refuses the elector's messages is an error at the start that names the setting."""
    topic = topic_name("refusing")
    ensure_leader_topic({"bootstrap.servers": kafka_bootstrap}, topic)
    alter_topic(kafka_bootstrap, topic, settings)
    with pytest.raises(LeaderTopicError, match=advice):
        contend(topic=topic)


def test_leader_topic_made_anew_may_hide_a_lease(contend, topic_name, kafka_bootstrap):
    """A process that starts waits for a lease if Kafka knows the group, and the topic shows no leader of it."""
    topic = topic_name("anew")
    first = leads(contend(quick=True, topic=topic))
    assert first._member._predecessor.gone_at < now(), "a new group waits for nobody"
    first.stop()
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})  # lives until it has answered
    admin.delete_topics([topic])[topic].result(10)
    until(lambda: topic not in admin.list_topics(timeout=10).topics)
    began = now()
    second = leads(contend(quick=True, topic=topic))
    assert second.times(LeaderAcquired)[0] > began + LEASE
    second.stop()
    began = now()
    third = leads(contend(quick=True, topic=topic))
    assert third._member._predecessor.gone_at < began, "what the topic shows is enough"


def test_leader_topic_that_begins_to_refuse(contend, topic_name, kafka_bootstrap, caplog):
    """While Kafka refuses the heartbeats there is no leader, a warning and trouble in each member; neither ends."""
    caplog.set_level(logging.INFO, logger="outbox_core.election")
    topic = topic_name("compacted")
    leader = leads(contend(quick=True, topic=topic))
    standby = contend(quick=True, topic=topic)
    assert (leader.trouble, standby.trouble) == (None, None)
    alter_topic(kafka_bootstrap, topic, {"cleanup.policy": "compact"})
    until(lambda: leader.trouble is not None)
    assert re.search(r"no leader for \d+ s: leader topic .* cleanup\.policy=delete", leader.trouble)
    until(lambda: leader.is_out)
    assert re.search(r"could not lead for \d+ s \(leader topic .* cleanup\.policy=delete", leader.trouble)
    until(lambda: standby.trouble is not None)  # it has the partition now
    for name in ("c0", "c1"):
        lines = [record.getMessage() for record in caplog.records if f"{name} cannot lead" in record.getMessage()]
        assert len(lines) <= 1
        assert all("cleanup.policy=delete" in line for line in lines)
    alter_topic(kafka_bootstrap, topic, {"cleanup.policy": "delete"})
    until(lambda: leader.is_leader or standby.is_leader, timeout=30)
    until(lambda: leader.trouble is None and standby.trouble is None, timeout=30)
    until(lambda: "takes messages again" in caplog.text)
    assert (leader.failure, standby.failure) == (None, None)


def test_standby_tells_that_kafka_is_away(contend, proxy):
    """A standby cut off from Kafka reports just that, and not a missing leader, until Kafka is back."""
    leader = leads(contend(quick=True))
    standby = contend(quick=True, bootstrap=proxy.bootstrap)
    time.sleep(0.5)
    proxy.cut()
    until(lambda: standby.trouble is not None)
    assert re.match(r"Kafka has not answered for \d+ s", standby.trouble)
    assert leader.trouble is None
    proxy.restore()
    until(lambda: standby.trouble is None)


def test_leader_of_another_server(contend, kafka_bootstrap, caplog):
    """Equally named outboxes of two servers: a member that meets the other's leader is refused, with both named."""
    ours = functools.partial(contend, outbox="shop.public.outbox", server_id="7300000000000000001")
    twin = functools.partial(contend, outbox="shop.public.outbox", server_id="7300000000000000002")
    leader = leads(ours())
    refused = twin()
    both = r"shop\.public\.outbox on database server 7300000000000000001, and ours .*7300000000000000002.*leaderGroupID"
    with pytest.raises(GroupRefused, match=both):
        refused.join(10)
    assert re.search(both, refused.trouble)
    leads_undisturbed(leader, 0.3)
    standby = ours()
    until(lambda: standby._member._health.has_heard)
    # The standby of one server has long been there when a leader of the other one turns up.
    beat = {
        "type": "heartbeat",
        "claim": leader.leadership.term,
        "id": str(uuid.uuid4()),
        "sequence": 1,
        "name": "twin",
    }
    contest = {"group": leader._config.group_id, "outbox": "shop.public.outbox", "server": "7300000000000000002"}
    leader.stop()
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "linger.ms": 0})

    def complains():
        producer.produce(leader._config.topic, json.dumps(beat | contest), partition=0)
        producer.poll(0.01)
        return "7300000000000000002" in (standby.trouble or "") + caplog.text

    until(complains)
    leads(standby)
    until(lambda: standby.trouble is None)
    assert standby.failure is None


def test_server_that_nobody_knows(contend):
    """Two members elect one leader although one of them could not read its server's ID."""
    leader = leads(contend(outbox="shop.public.outbox", server_id="7300000000000000001"))
    standby = contend(outbox="shop.public.outbox")
    until(lambda: standby._member._health.has_heard)
    leader.stop()
    leads(standby)


def test_missing_rights(contend, strict_broker):
    """Each missing right is an error that names the right, and the topic or group that needs it."""
    there = functools.partial(contend, bootstrap=strict_broker.bootstrap)
    with pytest.raises(LeaderTopicError, match=r"denied-making\.neli.*grant CREATE on it to User:ANONYMOUS"):
        there(group_id="denied-making")
    with pytest.raises(GroupRefused, match=r"denied-group.*grant READ on it to User:ANONYMOUS"):
        there(group_id="denied-group", topic="group-topic").join(10)
    with pytest.raises(LeaderTopicError, match=r"denied-writing\.neli.*WRITE on it to User:ANONYMOUS"):
        there(group_id="denied-writing").join(10)


def as_filter(acl):
    """Return a filter that matches one rule."""
    what = acl.restype, acl.name, acl.resource_pattern_type, acl.principal, acl.host, acl.operation
    return AclBindingFilter(*what, acl.permission_type)


def test_rights_withdrawn_from_a_running_member(contend, strict_broker):
    """A running member whose rights are withdrawn does not end: it tries again, and leads once they are back."""
    there = functools.partial(contend, quick=True, bootstrap=strict_broker.bootstrap, group_id="later-withdrawn")
    members = [leads(there()), there()]
    until(lambda: members[1]._member._health.has_heard and members[1]._member.has_joined)
    deny = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:*", "*", operation, AclPermissionType.DENY)
        for kind, name, operation in (
            (ResourceType.GROUP, "later-withdrawn", AclOperation.READ),
            (ResourceType.TOPIC, "later-withdrawn.neli", AclOperation.WRITE),
        )
    ]
    admin = AdminClient({"bootstrap.servers": strict_broker.bootstrap})
    for future in admin.create_acls(deny).values():
        future.result(10)
    until(lambda: all(member.trouble is not None for member in members))
    for member in members:
        assert re.search(r"no leader for \d+ s: .*authorization failed", member.trouble), member.trouble
    for future in admin.delete_acls([as_filter(acl) for acl in deny]).values():
        future.result(10)
    until(lambda: any(member.is_leader for member in members) and not any(member.trouble for member in members))
    assert [member.failure for member in members] == [None, None]


def test_embedded_broker(contend, tmp_path):
    """On librdkafka's mock cluster the leader topic is made, one of two members leads, and the other succeeds it."""
    broker = EmbeddedBroker(tmp_path)
    broker.start()
    try:
        there = functools.partial(contend, bootstrap=broker.bootstrap)
        first, second = there(), there()
        leader = until(lambda: next((c for c in (first, second) if c.is_leader), None))
        leader.stop()
        leads(second if leader is first else first)
        first.stop()
        second.stop()
    finally:
        broker.stop()


CONTENDER = """
import sys
from outbox_core.election import Neli, NeliConfig
Neli(NeliConfig(kafka={"bootstrap.servers": sys.argv[1]}, group_id=sys.argv[2]), lambda event: print(event, flush=True)
     ).background(lambda: __import__("time").sleep(0.01)).join()
"""


def test_killed_leader(contend, kafka_bootstrap):
    """With default times a successor leads less than 7 s after a SIGKILL of the leader."""
    standby = contend(start=False)
    process = subprocess.Popen(
        [sys.executable, "-c", CONTENDER, kafka_bootstrap, standby._config.group_id],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    try:
        assert "LeaderAcquired" in process.stdout.readline()
        standby.start()
        time.sleep(1.0)
        assert not standby.is_leader
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        leads(standby)
        took = time.monotonic() - killed
        print(f"fail-over took {took:.2f} s")  # noqa: T201
        assert took < 7
    finally:
        process.kill()
        process.wait()


def test_leader_topic_that_is_gone(contend, topic_name, kafka_bootstrap, monkeypatch):
    """Both members say why the leader topic is gone and cannot be made; one makes it once it may, and leads."""
    topic, forbidden = topic_name("gone"), True

    def make(*arguments):
        if forbidden:
            raise LeaderTopicError(f"leader topic {topic!r} cannot be made")
        return ensure_leader_topic(*arguments)

    monkeypatch.setattr(connection_log, "ensure_leader_topic", make)
    leader = leads(contend(quick=True, topic=topic))
    standby = contend(quick=True, topic=topic)
    until(lambda: standby._member._health.has_heard)
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})  # lives until it has answered
    admin.delete_topics([topic])[topic].result(10)
    for member in (leader, standby):
        until(lambda member=member: "cannot be made" in (member.trouble or ""), what=member.trouble)
        assert re.fullmatch(
            rf"leader group .* no leader for \d+ s: leader topic '{topic}' cannot be made", member.trouble
        )
    forbidden = False
    until(lambda: leader.is_leader or standby.is_leader)
    until(lambda: leader.trouble is None and standby.trouble is None)
