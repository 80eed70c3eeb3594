"""The lease, the messages and the state machine of NELI, without Kafka and without waiting."""

import json
import time
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox_core.election.lease import Leadership, now
from outbox_core.election.messages import Claim, Contest, Heartbeat, Resignation, decode, encode, encode_look
from outbox_core.election.protocol import Ownership, Predecessor, State
from outbox_core.events import LeaderAcquired, LeaderFenced

TIMEOUT = 5.0
INTERVAL = 0.25
OURS = Contest("billing", "shop.public.outbox", "7300000000000000001")
THEIRS = Contest("shipping", "depot.public.outbox", "7300000000000000002")


class Log:
    """A partition: each appended message gets the next offset."""

    def __init__(self):
        self.signals = []

    def append(self, signal):
        self.signals.append(signal)
        return len(self.signals) - 1


class Owner:
    """An ownership with its place in a log."""

    def __init__(self, log, name="me", position=None, predecessor=None):
        self.log = log
        self.predecessor = predecessor or Predecessor(TIMEOUT)
        self.ownership = Ownership(name, self.predecessor, timeout=TIMEOUT, interval=INTERVAL, contest=OURS)
        self.position = len(log.signals) if position is None else position

    def write(self, now):
        signal = self.ownership.next_signal(now)
        return None if signal is None else self.log.append(signal)

    def read(self, now):
        """Read one message; return the event."""
        offset = self.position
        self.position += 1
        return self.ownership.observe(offset, self.log.signals[offset], now)

    def read_all(self, now):
        events = []
        while self.position < len(self.log.signals):
            events.append(self.read(now))
        return [event for event in events if event is not None]


def leading(at=0.0):
    """Return an owner that leads since `at`, with the log it reads; its lease counts from `at`."""
    owner = Owner(Log())
    owner.write(at)
    owner.read(at)
    owner.write(at)
    assert isinstance(owner.read(at), LeaderAcquired)
    return owner


def test_lease_ends_at_its_deadline():
    """A lease is valid before its deadline and no longer at it."""
    lease = Leadership(uuid4(), 7, 10.0)
    assert lease.is_valid(9.999)
    assert not lease.is_valid(10.0)
    assert lease.remaining(8.0) == 2.0
    assert lease.remaining(11.0) == 0.0


def test_lease_is_renewed_from_the_sending():
    """The deadline is counted from the sending of the heartbeat, and never comes nearer."""
    lease = Leadership(uuid4(), 7, 10.0)
    renewed = lease.renewed(8.0, 5.0)
    assert (renewed.deadline, renewed.leader_id, renewed.term) == (13.0, lease.leader_id, 7)
    assert renewed.renewed(1.0, 5.0).deadline == 13.0


def test_clock_goes_on_while_the_machine_sleeps():
    """The lease's clock is CLOCK_BOOTTIME where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    assert time.clock_gettime(clock) == pytest.approx(now(), abs=0.5)


@given(st.uuids(), st.text(max_size=300), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.text(max_size=200))
def test_signals_survive_the_wire(token, name, claim, sequence, outbox):
    """Claims, heartbeats and resignations are read as they were written, the name cut at 200 characters."""
    contest = Contest("\N{GRINNING FACE}" * 1000, outbox, "7300000000000000001")
    made = Claim(token, name, contest)
    assert decode(encode(made)) == Claim(token, name[:200], contest)
    beat = Heartbeat(claim, token, sequence, name, contest)
    assert decode(encode(beat)) == Heartbeat(claim, token, sequence, name[:200], contest)
    assert decode(encode(Resignation(claim, token, name, contest))) == Resignation(claim, token, name[:200], contest)


def test_messages_can_be_read_by_both_versions():
    """Messages add fields to those of the first version; without the new ones they are read as before."""
    token = uuid4()
    old = {"type": "heartbeat", "claim": 42, "id": str(token), "sequence": 3, "name": "host"}
    written = json.loads(encode(Heartbeat(42, token, 3, "host", OURS)))
    assert written == old | {"group": "billing", "outbox": "shop.public.outbox", "server": "7300000000000000001"}
    assert decode(json.dumps(old).encode()) == Heartbeat(42, token, 3, "host", Contest())


def test_contests_agree_as_far_as_they_say():
    """Two contests contradict each other if both name an outbox, or both a server, and the names differ."""
    assert OURS.agrees(OURS)
    assert OURS.agrees(Contest("billing"))
    assert OURS.agrees(Contest("billing", "shop.public.outbox"))
    assert not OURS.agrees(Contest("billing", "shop.public.outbox", "7300000000000000002"))
    assert not OURS.agrees(Contest("billing", "shop.public.other", "7300000000000000001"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"[" * 2000,
        b"9" * 2000,
        b'{"type":"claim"}',
        b'{"type":"claim","id":"not a uuid","name":""}',
        b'{"type":"claim","id":5,"name":""}',
        b'{"type":"heartbeat","claim":"1","id":"6f0c1f6e-0000-4000-8000-000000000000","sequence":1,"name":""}',
        b'{"type":"heartbeat","id":"6f0c1f6e-0000-4000-8000-000000000000","sequence":1,"name":""}',
        b'{"type":"claim","id":"6f0c1f6e-0000-4000-8000-000000000000","name":"%s"}' % (b"x" * 33_000),
        b'{"type":"claim","id":"6f0c1f6e-0000-4000-8000-000000000000","name":"","group":5}',
        b'{"type":"claim","id":"6f0c1f6e-0000-4000-8000-000000000000","name":"","outbox":"%s"}' % (b"x" * 1001),
        encode_look("host", OURS),
    ],
)
def test_noise_is_no_signal(value):
    """Any other text on the topic is noise, and raises no error."""
    assert decode(value) is None


@given(st.binary(max_size=300))
def test_any_bytes_can_be_read(value):
    """Decoding of any bytes never raises."""
    assert decode(value) is None


def test_claim_alone_does_not_lead():
    """Only an own heartbeat begins a lease; the claim's offset is the term, and the lease counts from the sending."""
    log = Log()
    log.append(None)
    owner = Owner(log)
    owner.write(100.0)
    assert owner.read(100.2) is None
    assert owner.ownership.state is State.CANDIDATE
    owner.write(100.3)
    event = owner.read(100.9)
    assert isinstance(event, LeaderAcquired)
    assert event.term == 1
    assert owner.ownership.leadership == Leadership(event.leader_id, 1, 100.3 + TIMEOUT)


def test_own_heartbeat_renews():
    """Each own heartbeat that comes back moves the deadline, under the same leader ID and without an event."""
    owner = leading()
    before = owner.ownership.leadership
    owner.write(0.3)
    assert owner.read(0.8) is None
    after = owner.ownership.leadership
    assert (after.leader_id, after.term) == (before.leader_id, before.term)
    assert after.deadline == pytest.approx(0.3 + TIMEOUT)


def test_foreign_messages_do_not_renew():
    """Noise, foreign heartbeats (even with our claim's number) and unsent heartbeats leave the lease as it is."""
    owner = leading()
    lease = owner.ownership.leadership
    own = owner.log.signals[1]
    assert owner.ownership.next_signal(0.9).sequence == 2  # gets lost
    for signal in [
        None,
        Heartbeat(own.claim, uuid4(), 2),
        Heartbeat(own.claim + 100, uuid4(), 2),
        Heartbeat(own.claim, own.id, 99),
        own,
        owner.log.signals[0],
    ]:
        owner.log.append(signal)
    assert owner.read_all(1.0) == []
    assert owner.ownership.leadership == lease


def test_messages_of_another_group_change_nothing():
    """On a shared topic another group's claim deposes no leader, and its heartbeats are no sign of a rival."""
    owner = leading()
    lease = owner.ownership.leadership
    foreign = owner.log.append(Claim(uuid4(), "stranger", THEIRS))
    assert owner.read_all(1.0) == []
    assert owner.ownership.leadership == lease
    owner.log.append(Claim(uuid4(), "rival", OURS))
    assert isinstance(owner.read(2.0), LeaderFenced)
    owner.log.append(Heartbeat(foreign, uuid4(), 1, "stranger", THEIRS))
    owner.read(6.0)
    owner.ownership.on_caught_up(7.0)
    assert owner.ownership.state is State.CLAIMING


def test_message_without_a_group_is_of_ours():
    """A claim of a version that wrote no group deposes as a higher claim of our own group does."""
    owner = leading()
    owner.log.append(Claim(uuid4(), "earlier version"))
    assert isinstance(owner.read(1.0), LeaderFenced)


def test_rival_for_another_outbox_is_named():
    """A fence by a higher claim of our group for another server's outbox names both outbox and server."""
    owner = leading()
    owner.log.append(Claim(uuid4(), "twin", Contest("billing", "shop.public.outbox", "7300000000000000002")))
    assert "twin made a higher claim for shop.public.outbox on database server 7300000000000000002" in str(
        owner.read(1)
    )


def test_lease_over_fences_once():
    """A leader is fenced at its deadline, exactly once, without any message; the event has the term's number."""
    owner = leading()
    term = owner.ownership.leadership.term
    assert owner.ownership.expire(4.999) is None
    event = owner.ownership.expire(5.0)
    assert isinstance(event, LeaderFenced)
    assert "5 s" in event.reason
    assert event.term == term
    assert owner.ownership.leadership is None
    assert owner.ownership.expire(6.0) is None


def test_a_lapsed_lease_is_not_renewed_by_an_older_heartbeat():
    """A fenced leader leads again only after a heartbeat sent later, with a new leader ID and the same term."""
    owner = leading()
    old = owner.ownership.leadership
    owner.write(0.3)  # comes back only when the lease is over, though it would reach to 5.3
    assert isinstance(owner.read(5.1), LeaderFenced)
    assert owner.ownership.leadership is None
    owner.write(5.2)
    event = owner.read(5.3)
    assert isinstance(event, LeaderAcquired)
    assert event.term == old.term
    assert event.leader_id != old.leader_id


def test_higher_claim_deposes_at_once():
    """A claim that follows ours ends the lease, from any process; its heartbeats then keep us from claiming."""
    owner = leading()
    rival = owner.log.append(Claim(uuid4(), "rival"))
    event = owner.read(1.0)
    assert isinstance(event, LeaderFenced)
    assert "rival" in event.reason
    for second in (2, 4, 6, 8, 10):
        owner.log.append(Heartbeat(rival, uuid4(), second))
        owner.read(float(second))
        owner.ownership.on_caught_up(float(second))
        assert owner.write(float(second)) is None


def test_silence_of_the_rival_lets_claim_again():
    """After `timeout` without a sign of the rival a new claim is made; noise and old heartbeats are no sign."""
    owner = leading()
    own = owner.log.signals[1]
    rival = owner.log.append(Claim(uuid4(), "rival"))
    owner.read(1.0)
    for noise in (None, Heartbeat(own.claim, own.id, 7), Heartbeat(10**6, uuid4(), 1)):
        owner.log.append(noise)
        owner.read(3.0)
    owner.ownership.on_caught_up(5.9)
    assert owner.write(5.9) is None
    owner.ownership.on_caught_up(6.0)
    owner.write(6.0)
    owner.read(6.0)
    owner.write(6.0)
    event = owner.read(6.1)
    assert isinstance(event, LeaderAcquired)
    assert event.term > rival


def test_no_claim_before_everything_was_read():
    """A long pause does not count as the rival's silence: its heartbeats may be waiting unread."""
    owner = leading()
    rival = owner.log.append(Claim(uuid4(), "rival"))
    owner.read(1.0)
    owner.log.append(Heartbeat(rival, uuid4(), 1))
    owner.ownership.expire(60.0)
    assert owner.write(60.0) is None
    owner.read(60.0)
    owner.ownership.on_caught_up(60.0)
    assert owner.write(60.0) is None


def test_a_claim_that_got_lost_is_repeated():
    """An owner whose claim does not come back claims again, under a new ID; the first is lower if it still arrives."""
    owner = Owner(Log())
    first = owner.ownership.next_signal(0.0)
    assert owner.write(1.0) is None
    second = owner.ownership.next_signal(TIMEOUT / 2)
    assert isinstance(second, Claim)
    assert second.id != first.id
    owner.ownership.observe(0, first, 3.0)
    assert owner.ownership.state is State.CLAIMING
    owner.ownership.observe(1, second, 3.0)
    assert owner.ownership.state is State.CANDIDATE


def test_claims_from_before_ours_change_nothing():
    """A claim read before our own is lower, and changes nothing."""
    owner = Owner(Log())
    owner.write(0.0)
    owner.log.signals.insert(0, Claim(uuid4(), "earlier"))
    assert owner.read_all(0.1) == []
    assert owner.ownership.state is State.CANDIDATE


def test_unread_messages_may_hold_a_higher_claim():
    """A fenced owner that has missed messages does not resume its term, but waits for silence."""
    owner = leading()
    owner.ownership.expire(5.0)
    beat = owner.ownership.next_signal(5.0)
    assert owner.ownership.observe(50, beat, 5.1) is None
    assert owner.ownership.state is State.DEPOSED


def test_a_leader_topic_made_anew():
    """A leader whose heartbeats lie below its claim's offset, as on a topic made anew, is fenced and claims anew."""
    log = Log()
    log.signals = [None] * 100
    owner = Owner(log)
    owner.write(0.0)
    owner.read(0.0)
    owner.write(0.0)
    owner.read(0.0)
    beat = owner.ownership.next_signal(1.0)
    assert isinstance(owner.ownership.observe(0, beat, 1.1), LeaderFenced)
    claim = owner.ownership.next_signal(1.2)
    assert isinstance(claim, Claim)
    owner.ownership.observe(1, claim, 1.2)
    assert owner.ownership.observe(2, owner.ownership.next_signal(1.2), 1.3) is None
    assert isinstance(owner.ownership.observe(3, owner.ownership.next_signal(5.2), 5.3), LeaderAcquired)


def test_losing_the_partition_fences_once():
    """The loss of the partition ends a lease with one event, and no lease without any."""
    owner = leading()
    assert isinstance(owner.ownership.end("gone"), LeaderFenced)
    assert owner.ownership.end("gone") is None


def test_who_has_lost_the_partition_waits_for_its_own_lease():
    """It leads again only when its earlier lease would have run out, as its records may still be on their way."""
    owner = leading(at=0.0)
    owner.ownership.end("gone")
    again = Owner(owner.log, predecessor=owner.predecessor)
    for moment in (1.0, 1.0, 4.9):
        again.write(moment)
        assert again.read_all(moment) == []
    again.write(5.2)
    assert isinstance(again.read_all(5.2)[0], LeaderAcquired)


def test_attention_is_wanted_in_time():
    """The thread wakes for the next heartbeat, or for the deadline if that is nearer."""
    owner = leading()
    assert owner.ownership.wait_seconds(0.0) == pytest.approx(INTERVAL)
    owner.write(4.9)
    assert owner.ownership.wait_seconds(4.9) == pytest.approx(0.1)
    assert owner.ownership.wait_seconds(7.0) == 0.0


def successor_of(owner, *, assigned_at):
    """Return a new owner of the partition that has read all of the log and written its claim, with its first event."""
    successor = Owner(owner.log, "successor", position=0)
    successor.read_all(assigned_at)
    successor.write(assigned_at)
    successor.read_all(assigned_at)
    successor.write(assigned_at)
    return successor, successor.read_all(assigned_at)


def test_a_successor_waits_for_a_lease_that_may_run():
    """An owner leads only once the lease of a predecessor is over that may not have read its claim."""
    owner = leading(at=0.0)
    successor, events = successor_of(owner, assigned_at=1.0)
    assert events == []
    successor.write(5.9)
    assert successor.read_all(5.9) == []
    assert owner.ownership.leadership.deadline <= 5.0
    successor.write(6.2)
    assert isinstance(successor.read_all(6.2)[0], LeaderAcquired)


def test_a_successor_of_one_who_resigned_leads_at_once():
    """A resignation ends the wait for the lease of its claim, and for those of earlier ones."""
    owner = leading(at=0.0)
    owner.log.append(owner.ownership.resignation(0.5))
    owner.log.append(Heartbeat(0, uuid4(), 2, contest=OURS))  # arrives late
    _, events = successor_of(owner, assigned_at=1.0)
    assert isinstance(events[0], LeaderAcquired)


def test_only_who_has_waited_resigns():
    """An owner that an earlier leader's lease may outlive does not tell others that none runs."""
    owner = leading(at=0.0)
    successor, _ = successor_of(owner, assigned_at=1.0)
    assert successor.ownership.resignation(2.0) is None
    assert successor.ownership.resignation(7.0) is not None
    never = Owner(owner.log)
    assert never.ownership.resignation(100.0) is None


def test_heartbeats_behind_the_claim_delay_nobody():
    """A deposed leader that goes on writing, and reads nothing, does not keep its successor from leading."""
    owner = leading(at=0.0)
    successor, _ = successor_of(owner, assigned_at=1.0)
    for second in (2.0, 4.0, 5.9):
        owner.log.append(Heartbeat(0, owner.log.signals[0].id, int(second), contest=OURS))
        successor.read_all(second)
    successor.write(6.2)
    assert isinstance(successor.read_all(6.2)[0], LeaderAcquired)


def test_impossible_messages_neither_delay_nor_hurry():
    """Heartbeats and resignations of a claim that lies behind them are nobody's."""
    predecessor = Predecessor(TIMEOUT)
    predecessor.observe(5, Heartbeat(7, uuid4(), 1), 0.0)
    assert predecessor.gone_at == float("-inf")
    predecessor.observe(6, Heartbeat(2, uuid4(), 1), 0.0)
    predecessor.observe(7, Resignation(9, uuid4()), 0.0)
    assert predecessor.gone_at >= TIMEOUT
    predecessor.observe(8, Resignation(2, uuid4()), 0.0)
    assert predecessor.gone_at == float("-inf")


def test_resignations_of_a_topic_that_was_made_anew():
    """After the topic was made anew its low offsets count again."""
    predecessor = Predecessor(TIMEOUT)
    predecessor.observe(100, Resignation(90, uuid4()), 0.0)
    predecessor.observe(1, Heartbeat(0, uuid4(), 1), 0.0)
    assert predecessor.gone_at >= TIMEOUT


def test_what_cannot_be_read_is_waited_for():
    """Without a place in the topic a lease may run that nothing tells of."""
    predecessor = Predecessor(TIMEOUT)
    predecessor.suspect(3.0)
    predecessor.observe(100, Resignation(90, uuid4()), 3.0)
    assert predecessor.gone_at >= 3.0 + TIMEOUT


def test_a_suspicion_ends():
    """A member that once had to wait for what it could not read takes a later resignation at its word."""
    predecessor = Predecessor(TIMEOUT)
    predecessor.suspect(0.0)
    predecessor.observe(100, Heartbeat(90, uuid4(), 1), 60.0)
    assert predecessor.gone_at >= 60.0 + TIMEOUT
    predecessor.observe(101, Resignation(90, uuid4()), 60.1)
    assert predecessor.gone_at < 60.0


@pytest.mark.parametrize("silence", [1.0, 2 * TIMEOUT])
def test_a_rival_on_a_topic_that_was_made_anew(silence):
    """An owner cut off while the topic was made anew does not lead beside a rival whose claim has a lower number."""
    log = Log()
    log.signals = [None] * 50
    owner = Owner(log)
    for _ in range(2):
        owner.write(0.0)
        owner.read_all(0.0)
    assert owner.ownership.leadership.term == 50
    anew = Log()
    rival = Owner(anew, "rival")
    for beat in range(60):
        rival.write(silence + beat * INTERVAL)
        rival.read_all(silence + beat * INTERVAL)
    at = silence + 60 * INTERVAL
    assert rival.ownership.leadership.is_valid(at)
    owner.log, owner.position = anew, 0
    owner.ownership.expire(at)
    owner.write(at)
    owner.read_all(at)
    assert owner.ownership.leadership is None
    assert owner.ownership.state is State.CLAIMING


def test_a_deposed_owner_on_a_topic_that_was_made_anew():
    """It leaves alone a rival that lives, whose claim has a lower number by now, until that falls silent."""
    log = Log()
    log.signals = [None] * 50
    owner, rival = Owner(log), Owner(log, "rival")
    for _ in range(2):
        owner.write(0.0)
        owner.read_all(0.0)
    rival.write(0.0)
    assert isinstance(owner.read_all(0.1)[0], LeaderFenced)
    anew = Log()
    rival = Owner(anew, "rival")
    owner.log, owner.position = anew, 0
    for beat in range(60):
        at = 1.0 + beat * INTERVAL
        rival.write(at)
        rival.read_all(at)
        owner.read_all(at)
        owner.ownership.on_caught_up(at)
        assert owner.ownership.state is State.DEPOSED
    assert rival.ownership.leadership.is_valid(at)
    owner.ownership.on_caught_up(at + TIMEOUT)
    assert owner.ownership.state is State.CLAIMING


def test_old_heartbeats_that_are_read_once_more_give_no_lease():
    """A reader that is set back to its own claim, as the log's end was lost, takes no heartbeat there for a new one."""
    owner = leading(0.0)
    owner.position = 0
    assert isinstance(owner.read(10.0), LeaderFenced)
    owner.ownership.next_signal(20.0)  # and this one is lost
    owner.read_all(20.0)
    assert owner.ownership.leadership is None


class Contention(RuleBasedStateMachine):
    """A machine with more owners at once than Kafka would allow, each reading one log at its own pace.

    Writes get lost, owners pause, strangers write too. `time` is the one true clock.
    """

    def __init__(self):
        super().__init__()
        self.time = 0.0
        self.log = Log()
        self.owners = []
        self.sent = {}  # offset of a heartbeat -> when it was sent
        self.ids = set()
        self.last_event = {}

    def keep(self, owner, event):
        if event is None:
            return
        previous = self.last_event.get(owner)
        if isinstance(event, LeaderAcquired):
            assert not isinstance(previous, LeaderAcquired), "acquired twice"
            assert event.leader_id not in self.ids, "a leader ID was used twice"
            self.ids.add(event.leader_id)
        else:
            assert isinstance(previous, LeaderAcquired), "fenced without leading"
            assert event.leader_id == previous.leader_id
        self.last_event[owner] = event

    @precondition(lambda self: len(self.owners) < 3)
    @rule()
    def assign(self):
        self.owners.append(Owner(self.log, f"owner {len(self.owners)}", position=0))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), arrives=st.integers(0, 9).map(bool))
    def write(self, data, arrives):
        owner = data.draw(st.sampled_from(self.owners))
        signal = owner.ownership.next_signal(self.time)
        if signal is not None and arrives:
            offset = self.log.append(signal)
            if isinstance(signal, Heartbeat):
                self.sent[offset] = self.time

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), most=st.sampled_from([1, 5, 1000]))
    def read(self, data, most):
        owner = data.draw(st.sampled_from(self.owners))
        for _ in range(min(most, len(self.log.signals) - owner.position)):
            self.keep(owner, owner.read(self.time))
            self.check_lease(owner)
        if owner.position == len(self.log.signals):
            owner.ownership.on_caught_up(self.time)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def run(self, data):
        """One owner reads all, and all that it writes arrives; the others stand still."""
        owner = data.draw(st.sampled_from(self.owners))
        for _ in range(2):
            while owner.position < len(self.log.signals):
                self.keep(owner, owner.read(self.time))
                self.check_lease(owner)
            owner.ownership.on_caught_up(self.time)
            signal = owner.ownership.next_signal(self.time)
            if signal is not None:
                offset = self.log.append(signal)
                if isinstance(signal, Heartbeat):
                    self.sent[offset] = self.time

    def check_lease(self, owner):
        """Check that a lease rests on the highest claim of our group that was read, and on an own heartbeat."""
        lease = owner.ownership.leadership
        if lease is None:
            return
        read = list(enumerate(self.log.signals[: owner.position]))
        assert lease.term == max(o for o, signal in read if isinstance(signal, Claim) and OURS.includes(signal.contest))
        own = [self.sent[o] for o, s in read if isinstance(s, Heartbeat) and s.claim == lease.term and o in self.sent]
        assert lease.deadline <= max(own) + TIMEOUT

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def expire(self, data):
        owner = data.draw(st.sampled_from(self.owners))
        self.keep(owner, owner.ownership.expire(self.time))

    @precondition(lambda self: len(self.owners) == 3)
    @rule(data=st.data(), arrives=st.booleans())
    def resign(self, data, arrives):
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.keep(owner, owner.ownership.end("a hand-over"))
        resignation = owner.ownership.resignation(self.time)
        if resignation is not None and arrives:
            self.log.append(resignation)

    @rule(seconds=st.sampled_from([0.01, 0.3, 0.3, 1.0, 4.9, 5.0, 30.0]))
    def wait(self, seconds):
        self.time += seconds

    @rule(
        claim=st.integers(-1, 50),
        kind=st.sampled_from(["noise", "noise", "noise", "claim", "heartbeat"]),
        contest=st.sampled_from([OURS, THEIRS, Contest()]),
    )
    def stranger(self, claim, kind, contest):
        made = {
            "noise": None,
            "claim": Claim(uuid4(), "stranger", contest),
            "heartbeat": Heartbeat(claim, uuid4(), 1, "stranger", contest),
        }
        self.log.append(made[kind])

    @invariant()
    def only_one_who_has_read_everything_leads(self):
        up_to_date = [o for o in self.owners if o.position == len(self.log.signals) and o.ownership.leadership]
        assert len(up_to_date) <= 1

    @invariant()
    def only_one_has_a_valid_lease(self):
        leases = [owner.ownership.leadership for owner in self.owners]
        assert sum(lease is not None and lease.is_valid(self.time) for lease in leases) <= 1


TestContention = Contention.TestCase


def test_leader_ids_are_uuids():
    """A leader ID is a random UUID."""
    assert isinstance(leading().ownership.leadership.leader_id, UUID)
    assert leading().ownership.leadership.leader_id.version == 4


def test_a_heartbeat_that_took_longer_than_a_lease_gives_none():
    """A lease that would be over when it begins does not begin; the next heartbeat that is in time gives one."""
    one = Ownership("a", Predecessor(TIMEOUT), timeout=TIMEOUT, interval=INTERVAL)
    one.observe(0, one.next_signal(0.0), 0.1)
    late = one.next_signal(0.1)
    assert one.observe(1, late, 5.2) is None
    assert one.leadership is None
    assert isinstance(one.observe(2, one.next_signal(5.2), 5.3), LeaderAcquired)
