"""The member of the group without a broker: what it makes of messages, and of a client that refuses to write."""

import time
from dataclasses import replace
from types import SimpleNamespace
from uuid import uuid4

import pytest

from outbox_core.election.config import NeliConfig
from outbox_core.election.lease import now
from outbox_core.election.member import ClientBroken, Member
from outbox_core.election.messages import Claim, Contest, Heartbeat, Resignation, encode
from outbox_core.election.observer import signal_in
from outbox_core.errors import GroupRefused, KafkaUnavailable, OutboxError
from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.kafka.clients import KafkaError, KafkaException, TopicPartition

PLACE = TopicPartition("billing.neli", 0)
NOWHERE = {"bootstrap.servers": "127.0.0.1:1"}
SOME_TIME = 3600.0  # longer than any lease


class _Group:
    """The consumer, as far as an assignment needs it."""

    def incremental_assign(self, partitions):
        self.assigned = partitions


class _Writer:
    """A producer without a broker, which refuses to write once it has an error."""

    error = None

    def __init__(self):
        self.written = []

    def produce(self, _topic, value, *, on_delivery, **_):
        if self.error is not None:
            raise self.error
        self.written.append(SimpleNamespace(value=lambda: value, offset=lambda: 0))
        on_delivery(None, self.written[-1])

    def purge(self, **_):
        pass

    def poll(self, _seconds):
        return 0

    def close(self):
        self.is_closed = True


@pytest.fixture
def member():
    """A member that has joined at offset 1000, and writes nowhere; `events` are those it has told."""
    events = []
    made = Member(NeliConfig(kafka=NOWHERE, group_id="billing"), 1, events.append, lambda _: None)
    made._producer = _Writer()
    made._make_producer = lambda: made._producer
    made._make_observer = lambda: made._observer
    made._joined_at = made._position = 1000
    made.events = events
    yield made
    made.close()


def message(offset, signal, *, age=0.0):
    """Return the message of the leader topic that brings a signal."""
    return SimpleNamespace(
        offset=lambda: offset,
        partition=lambda: 0,
        error=lambda: None,
        value=lambda: encode(signal),
        timestamp=lambda: (1, int((time.time() - age) * 1000)),
    )


def make_leader(member):
    """Have the member own the partition and lead."""
    member._on_assign(_Group(), [PLACE])
    member._read(message(1000, member._ownership._claim))
    member._read(message(1001, member._ownership.next_signal(now())))
    assert isinstance(member.events[-1], LeaderAcquired)


@pytest.mark.parametrize("error", [KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC)), BufferError("queue full")])
def test_a_resignation_that_the_client_refuses(member, error):
    """A hand-over ends although the resignation cannot be written, as when the leader topic was deleted."""
    make_leader(member)
    member._producer.error = error
    member._on_revoke(None, [PLACE])
    assert isinstance(member.events[-1], LeaderRevoked)
    assert member.leadership is None


def test_a_hand_over_waits_for_the_work_before_the_partition_is_given_up(member):
    """The work ends while the lease is still ours; only then its end is told, and the successor hears of it."""
    make_leader(member)
    lease, seen = member.leadership, []
    member._barrier = lambda of: seen.append((of, member.leadership, member.events[-1]))
    member._producer.written.clear()
    member._on_revoke(None, [PLACE])
    ((of, still, last),) = seen
    assert of == still == lease
    assert isinstance(last, LeaderAcquired)
    assert isinstance(member.events[-1], LeaderRevoked)
    assert [type(signal_in(message)) for message in member._producer.written] == [Resignation]


def test_a_lease_that_is_over_is_not_handed_over(member, monkeypatch):
    """A lease that ran out before the hand-over is fenced: nobody waits for work that may go on elsewhere."""
    make_leader(member)
    start = now()
    monkeypatch.setattr("outbox_core.election.member.now", lambda: start + SOME_TIME)
    member._producer.error = BufferError("queue full")
    member._on_revoke(None, [PLACE])
    assert isinstance(member.events[-1], LeaderFenced)


def test_signs_of_life_on_a_topic_that_was_made_anew(member, monkeypatch):
    """On a topic that was made anew a standby hears leaders although their offsets are lower than where it joined."""
    member._observe(message(1000, Claim(uuid4(), "first")))
    start = now()
    monkeypatch.setattr("outbox_core.election.group_health.now", lambda: start + SOME_TIME)
    assert member.trouble is not None
    member._observe(message(0, Claim(uuid4(), "second")))
    member._observe(message(1, Heartbeat(0, uuid4(), 1, "second")))
    assert member.trouble is None


def test_messages_before_the_first_that_was_read_are_waited_for(member):
    """A member that could not find its place waits for the leases of messages that it has not read."""
    member._position = -1
    begun = now()
    member._observe(message(500, Resignation(400, uuid4())))
    assert member._predecessor.gone_at >= begun + 5.0


def test_a_group_without_a_leader_is_joined_anew(member, monkeypatch):
    """A member that hears of no leader for three sessions joins again, then ever more rarely; an owner does not."""
    calls, start, passed = [], now(), [0.0]
    member._consumer.close()
    member._consumer = SimpleNamespace(
        assignment=list,
        get_watermark_offsets=lambda *_, **__: (0, 2000),
        poll=lambda _: None,
        subscribe=lambda topics, **_: calls.append(topics),
        unsubscribe=lambda: None,
        close=lambda: calls.append("leave"),
    )
    member._make_consumer = lambda: member._consumer
    member._observer.poll = lambda _: None
    member._health.probe = lambda _: None
    monkeypatch.setattr("outbox_core.election.group_health.now", lambda: start + passed[0])
    patience = 3 * member._config.session_timeout.total_seconds()

    def joins_at(*seconds):
        calls.clear()
        for passed[0] in seconds:
            member.run_once()
        return calls.count("leave")

    assert joins_at(0.0, 0.9 * patience) == 0
    assert joins_at(1.1 * patience, 1.2 * patience, 2.1 * patience) == 1
    assert calls == ["leave", [member._config.topic]]
    assert joins_at(2.3 * patience, 4.5 * patience) == 1
    member._health.on_signal(Heartbeat(0, uuid4(), 1, "leader", member._config.contest))
    assert joins_at(4.6 * patience, 5.4 * patience) == 0
    make_leader(member)
    assert joins_at(99 * patience) == 0


class _Consumer:
    """The group's consumer, as far as joining and leaving need it."""

    def __init__(self):
        self.calls = []

    assignment = list

    def get_watermark_offsets(self, *_, **__):
        return 0, 2000

    def poll(self, _seconds):
        return None

    def subscribe(self, _topics, **_):
        self.calls.append("join")

    def unsubscribe(self):
        self.calls.append("leave")

    def close(self):
        self.calls.append("close")


class _Observer:
    """A reader beside the group that brings nothing."""

    def poll(self, _first):
        pass

    def pause(self):
        pass

    def close(self):
        pass


@pytest.fixture
def clock(member, monkeypatch):
    """Return a function that lets some seconds pass, with a turn of the member in each; it is the only clock."""
    time_ = [now()]
    member._consumer.close()
    member._consumer = _Consumer()
    member._make_consumer = lambda: member._consumer
    member._observer.poll = lambda _: None
    member._health.probe = lambda _: None
    for module in ("member", "group_health", "connection_log"):
        monkeypatch.setattr(f"outbox_core.election.{module}.now", lambda: time_[0])

    def passes(seconds):
        for _ in range(round(seconds)):
            time_[0] += 1.0
            member.run_once()

    passes(1)
    return passes


def own_look(member):
    """Have the observer read the last look that the member wrote."""
    look = member._producer.written[-1].value()
    assert b'"look"' in look
    member._observe(SimpleNamespace(**vars(message(member._position, Claim(uuid4()))) | {"value": lambda: look}))


def test_an_owner_that_cannot_lead_leaves(member, clock):
    """Two sessions after the assignment, not before, and it comes back by a look that was written and read."""
    member._on_assign(_Group(), [PLACE])
    clock(12)
    assert member._consumer.calls == []
    clock(1)
    assert member._consumer.calls == ["leave"]
    assert member.trouble.startswith("left leader group 'billing' for 0 s: it had the partition and could not lead for")
    clock(100)  # its looks are acknowledged at offset 0, and nothing is read
    assert member._consumer.calls == ["leave"]
    assert "for 100 s" in member.trouble
    own_look(member)
    clock(1)
    assert member._consumer.calls == ["leave", "close", "join"]
    assert not member.is_out


def test_clients_that_know_an_old_leader_alone(member, clock):
    """A broker that is cut off from the cluster may be the only one that a client asks who leads: others are made."""
    made = []

    def makes(name, fake):
        def make():
            made.append(name)
            return fake()

        setattr(member, f"_make_{name}", make)

    makes("producer", _Writer)
    makes("observer", _Observer)
    makes("consumer", _Consumer)
    before = member._producer, member._observer, member._consumer
    clock(18)  # without a leader
    assert made == ["producer", "observer", "consumer"]
    assert before[0].is_closed
    made.clear()
    member._on_assign(_Group(), [PLACE])
    clock(13)
    assert member.is_out
    assert made == []
    clock(2)
    assert made == ["producer", "observer"]
    looks = [message for message in member._producer.written if b'"look"' in message.value()]
    assert len(looks) == 1
    clock(5)
    own_look(member)
    clock(1)
    assert not member.is_out
    assert made == ["producer", "observer", "producer", "observer", "consumer"]


def test_other_clients_that_cannot_be_made(member, clock):
    """While a token is away, looks go by the clients that are there."""

    def away():
        raise KafkaUnavailable("no token")

    member._make_observer = away
    member._on_assign(_Group(), [PLACE])
    clock(15)
    assert member.is_out
    own_look(member)
    clock(6)
    assert not member.is_out


def test_a_lease_that_ended_is_where_the_count_begins(member, clock):
    """A leader whose lease ends has two sessions from then, however long it led; one that leads again stays."""
    make_leader(member)
    lease = member.leadership
    member._ownership.leadership = replace(lease, deadline=lease.deadline + 30)  # renewed again and again
    clock(30)
    assert member._consumer.calls == []
    member._ownership.leadership = replace(lease, deadline=0.0)
    clock(1)
    assert isinstance(member.events[-1], LeaderFenced)
    clock(11)
    assert member._consumer.calls == []
    clock(2)
    assert member._consumer.calls == ["leave"]


def test_a_topic_that_is_made_anew_is_where_the_count_begins(member, clock):
    """An owner whose leader topic is made anew has two sessions from then: nobody else would lead sooner."""
    member._on_assign(_Group(), [PLACE])
    clock(11)
    member._read(message(1000, Claim(uuid4())))
    member._read(message(0, Claim(uuid4())))
    clock(11)
    assert member._consumer.calls == []
    clock(3)
    assert member._consumer.calls == ["leave"]


def test_who_gets_the_partition_after_a_long_silence_stays(member, clock):
    """A standby that heard nobody for a minute has two sessions of its own once it gets the partition."""
    clock(60)
    member._consumer.calls.clear()  # it has joined anew
    member._on_assign(_Group(), [PLACE])
    clock(11)
    assert member._consumer.calls == []


def test_a_deposed_owner_stays_while_its_rival_beats(member, clock):
    """Whose claim is lower, and who hears the rival's heartbeats, does not leave: somebody leads."""
    make_leader(member)
    rival = uuid4()
    member._read(message(1002, Claim(rival, "rival")))
    for offset in range(1003, 1043):
        member._read(message(offset, Heartbeat(1002, rival, offset, "rival")))
        clock(1)
    assert member._consumer.calls == []
    clock(30)  # the rival is silent: it claims anew, and no claim comes back
    assert member._consumer.calls == ["leave"]


def test_claims_without_heartbeats_are_no_leader(member, clock):
    """A stranger that claims again and again, and never leads, does not keep an owner in the group."""
    make_leader(member)
    for offset in range(1002, 1017):
        member._read(message(offset, Claim(uuid4(), "stranger")))
        clock(1)
    assert member._consumer.calls == ["leave"]


def test_stepping_down_is_a_hand_over(member, clock):
    """The work ends, the resignation is written, and only then is the group left."""
    make_leader(member)
    member._producer.written.clear()
    order = []
    member._barrier = lambda _: order.append(list(member._consumer.calls))
    member.step_down("no database", lambda: False)
    assert order == [[]]
    assert isinstance(member.events[-1], LeaderRevoked)
    assert [type(signal_in(each)) for each in member._producer.written] == [Resignation]
    assert member._consumer.calls == ["leave"]
    assert member.leadership is None
    assert "no database; comes back when it is able again" in member.trouble
    clock(8)
    assert member._consumer.calls == ["leave"]
    clock(8)  # nobody leads
    assert member._consumer.calls == ["leave", "close", "join"]
    assert member.trouble is None or "left" not in member.trouble


@pytest.mark.usefixtures("clock")
def test_an_absence_begins_after_the_hand_over(member, monkeypatch):
    """However long the work in flight takes to end, the session out of the group begins after that."""
    make_leader(member)
    at = now()
    member._barrier = lambda _: monkeypatch.setattr("outbox_core.election.member.now", lambda: at + 30.0)
    member.step_down("no database", lambda: True)
    member._absence._question.is_able = True
    for seconds, is_out in ((30.1, True), (35.9, True), (36.5, False)):
        monkeypatch.setattr("outbox_core.election.member.now", lambda seconds=seconds: at + seconds)
        member.run_once()
        assert member.is_out == is_out


def test_an_assignment_that_comes_late(member, clock):
    """A partition that was assigned just before the group was left is not claimed: the claim would depose a leader."""
    member.step_down("no database", lambda: False)
    member._producer.written.clear()
    member._on_assign(_Group(), [PLACE])
    clock(3)
    assert member._producer.written == []
    member._on_revoke(None, [PLACE])
    assert member.events == []


def test_who_stepped_down_waits_while_another_leads(member, clock):
    """Heartbeats of another leader keep a member out that is not able."""
    member.step_down("no database", lambda: False)
    leader = uuid4()
    for offset in range(1000, 1060):
        member._observe(message(offset, Heartbeat(900, leader, offset, "leader")))
        clock(1)
    assert member._consumer.calls == ["leave"]
    assert member.hears_leader


def test_a_member_that_is_out_can_step_down(member, clock, caplog):
    """The newer reason counts: an owner that could not lead, and then cannot work either, waits for its work."""
    member._on_assign(_Group(), [PLACE])
    clock(13)
    assert member.is_out
    clock(4)
    member.step_down("no database", lambda: False)
    assert "left leader group 'billing' for 4 s: no database; comes back when it is able again" in member.trouble
    assert "stays out of leader group billing: no database; comes back when it is able again" in caplog.messages[-1]
    clock(5)
    assert member.is_out
    clock(6)  # and like any that stepped down it tries when nobody does
    assert not member.is_out


def test_stepping_down_again_and_again(member, clock, caplog):
    """A member that is told so every second is back as soon as one that was told once, and logs one line of it."""
    make_leader(member)
    member.step_down("no database", lambda: False)
    for second in range(20):
        clock(1)
        if not member.is_out:
            break
        member.step_down(f"no database for {second} s", lambda: False)
        assert f"no database for {second} s" in member.trouble
    assert not member.is_out
    assert member._consumer.calls == ["leave", "close", "join"]
    assert len([line for line in caplog.messages if "no database" in line]) == 1


def test_a_group_is_joined_anew_although_no_client_can_be_made(member, clock):
    """While a token or a file of certificates is away, the client that is there asks again, and nothing ends."""

    def away():
        raise KafkaUnavailable("no token")

    member._make_consumer = away
    clock(20)
    assert member._consumer.calls == ["leave", "join"]


def test_who_comes_back_does_not_join_anew_at_once(member, clock):
    """After long silence it has joined a moment ago: the group is joined anew three sessions later."""
    clock(12)
    member.step_down("no database", lambda: False)
    while member.is_out:
        clock(1)
    clock(17)
    assert member._consumer.calls == ["leave", "close", "join"]
    clock(2)
    assert member._consumer.calls == ["leave", "close", "join", "close", "join"]


def test_a_client_that_gave_up(member):
    """Its fatal error is one that another client may not have; before the member has joined it ends the start."""
    fatal = KafkaError(KafkaError._FENCED, "fenced", fatal=True)
    with pytest.raises(OutboxError, match="gave up: fenced") as caught:
        member._on_error(fatal)
    assert not isinstance(caught.value, ClientBroken)
    member._on_assign(_Group(), [])
    with pytest.raises(ClientBroken, match="gave up: fenced"):
        member._on_error(fatal)


def test_a_successor_of_a_broken_client_is_refused_by_nobody(member, caplog):
    """A stranger that leads, a group that takes nobody: they end a process that starts, and pass later."""
    stranger = Heartbeat(900, uuid4(), 1, "stranger", Contest("billing", "another.outbox", "1"))
    member._config = replace(member._config, outbox="ours.outbox", server_id="1")
    member._health._config = member._config
    full = KafkaError(KafkaError.GROUP_MAX_SIZE_REACHED, "full")
    for refused in (lambda: member._health.on_signal(stranger), lambda: member._on_error(full)):
        with pytest.raises(GroupRefused):
            refused()
    member.succeeds()
    member._health.on_signal(stranger)
    member._on_error(full)
    assert "led by stranger" in caplog.messages[-2]
    assert "hindered" in caplog.messages[-1]
