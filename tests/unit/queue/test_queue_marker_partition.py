"""The tracker's right time to redeliver, with markers in any order relative to its ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.kafka.clients import TIMESTAMP_LOG_APPEND_TIME
from outbox_queue.protocol import markers as wire
from outbox_queue.redelivery.partition import MarkerPartition
from tests.queueing import start_marker

CREATE_TIME = 1
MANY = (1000, 1_000_000)


class Log:
    """A marker partition as the broker has it, with a clock, and a tracker that has read a part of it."""

    def __init__(self, *, kind=TIMESTAMP_LOG_APPEND_TIME, interval=5000.0, longest=10**9):
        self.markers = MarkerPartition(0, tick_interval=interval, longest_ms=longest)
        self.kind, self.now, self.records, self.read = kind, 1000.0, [], 0
        self.set_by = 0.0  # how far the broker's clock is off

    def append(self, value):
        self.records.append((len(self.records), (self.kind, int(self.now + self.set_by) + 10**12), b"key", value))

    def start(self, number, after):
        self.append(start_marker(0, number, after, b"q", b"p", attempt=1, enqueued_at_ms=1, max_attempts=3))

    def keep_alive(self, number, after, **more):
        self.append(wire.keep_alive_marker(0, number, after, **more))

    def end(self, number):
        self.append(wire.end_marker(0, number))

    def tick(self, *, may_judge=True):
        value, token = self.markers.send_tick(self.now, may_judge=may_judge)
        self.append(value)
        return token

    def pass_by(self, milliseconds):
        """Let time pass, with a tracker that sends and reads ticks when it wants to; return what expired."""
        for _ in range(int(milliseconds / 100)):
            self.now += 100
            if self.markers.wants_tick(self.now):
                self.tick()
            self.read_all()
        return self.take()

    def read_all(self, most=10**9):
        for record in self.records[self.read : self.read + most]:
            self.markers.read(*record, self.now)
            self.read += 1

    def take(self):
        return [entry.message_id[1] for entry in self.markers.take_expired(*MANY)]


def test_nothing_expires_before_a_tick_was_read_back():
    """No message is redelivered, however late it is, before the tick has been read back."""
    log = Log()
    log.start(1, 100)
    log.read_all()
    log.now += 60_000
    assert log.markers.wants_tick(log.now)
    assert log.take() == []
    log.tick()
    assert log.take() == []
    assert not log.markers.wants_tick(log.now)
    log.read_all()
    assert log.take() == [1]
    assert log.markers.is_caught_up


def test_what_was_finished_before_the_tick_is_not_handed_out():
    """An unread end or keep-alive counts even if its message seems expired."""
    log = Log()
    for number in range(3):
        log.start(number, 100)
    log.read_all()
    log.now += 1000
    assert log.markers.looks_expired(log.now)
    log.end(0)
    log.keep_alive(1, 50_000)
    log.tick()
    log.read_all()
    assert log.take() == [2]


def test_what_ends_between_the_tick_and_the_redelivery_is_left_out():
    """A judged message whose end or keep-alive is read before its turn is not handed out."""
    log = Log()
    for number in range(3):
        log.start(number, 100)
    log.now += 1000
    log.tick()
    log.read_all()
    log.end(0)
    log.keep_alive(1, 500)
    log.read_all()
    assert log.take() == [2]
    log.now += 1000
    log.tick()
    log.read_all()
    assert log.take() == [1]


def test_an_unprepared_tick_judges_nothing():
    """A tick sent before others were fenced completes catching up, and hands out no message."""
    log = Log()
    log.start(1, 100)
    log.now += 1000
    log.tick(may_judge=False)
    log.read_all()
    assert log.markers.is_caught_up
    assert log.take() == []


def test_foreign_ticks_tell_the_time_and_nothing_else():
    """Another tracker's tick neither ends the wait for ours nor judges."""
    log, other = Log(), Log()
    log.start(1, 100)
    log.now += 1000
    other.now = log.now
    other.tick()
    log.append(other.records[0][3])
    token = log.tick()
    log.read_all(2)
    assert log.markers.tick.token == token
    assert log.take() == []


def test_with_timestamps_of_producers_a_tick_tells_no_time():
    """On a CreateTime topic the time goes on by the monotonic clock, from the last marker on."""
    log = Log(kind=CREATE_TIME)
    log.tick()
    log.read_all()
    assert log.markers.is_caught_up
    log.start(1, 100)
    log.read_all()
    log.now += 99
    log.tick()
    log.read_all()
    assert log.take() == []
    log.now += 2
    log.tick()
    log.read_all()
    assert log.take() == [1]


def test_the_offset_to_commit_is_that_of_the_first_unfinished_start():
    """The offset to commit is the first unfinished start's, or else the end of reading; at first there is none."""
    log = Log()
    assert log.markers.offset_to_commit() is None
    log.start(1, 100)
    log.start(2, 100)
    log.end(1)
    log.read_all()
    assert log.markers.offset_to_commit() == 1
    log.end(2)
    log.read_all()
    assert log.markers.offset_to_commit() == 4


def test_what_was_not_redelivered_comes_up_again():
    """After a failure all judged messages are judged anew, by a tick of their own."""
    log = Log()
    log.start(1, 100)
    log.start(2, 100)
    log.now += 1000
    log.tick()
    log.read_all()
    entries = log.markers.take_expired(1, 10**6)
    log.markers.put_back(entries)
    log.markers.judge_again()
    assert log.take() == []
    log.tick()
    log.read_all()
    taken = log.markers.take_expired(*MANY)
    assert sorted(entry.message_id[1] for entry in taken) == [1, 2]
    log.markers.finish(taken)
    assert len(log.markers) == 0


def test_a_postponed_message_waits():
    """A message that Kafka refuses expires again only after a while."""
    log = Log()
    log.start(1, 100)
    log.now += 1000
    log.tick()
    log.read_all()
    log.markers.postpone(log.markers.take_expired(*MANY), 60_000)
    assert not log.markers.looks_expired(log.now + 59_000)
    assert log.markers.looks_expired(log.now + 61_000)


def test_ticks_are_sent_while_messages_are_in_progress():
    """An idle partition has no ticks but the first; one with messages has one an interval."""
    log = Log(interval=5000.0)
    log.tick()
    log.read_all()
    log.now += 100_000
    assert not log.markers.wants_tick(log.now)
    log.start(1, 10**8)
    log.read_all()
    assert log.markers.wants_tick(log.now)
    log.tick()
    log.read_all()
    assert not log.markers.wants_tick(log.now + 4999)
    assert log.markers.wants_tick(log.now + 5000)


@pytest.mark.parametrize("idle", [3000, 3_600_000])
@pytest.mark.parametrize("set_by", [-2900, -90_000, -7_200_000, 90_000])
def test_a_clock_that_was_set_expires_nothing_that_was_started_since(idle, set_by):
    """A message that is started after its broker's clock was set, and long after the last tick, has its whole time."""
    log = Log()
    assert log.pass_by(1000) == []
    log.now += idle
    log.set_by = set_by
    log.start(1, 4000)
    assert log.pass_by(3800) == []
    assert log.pass_by(4000) == [1]


@pytest.mark.parametrize("set_by", [-2900, -90_000, 90_000])
def test_a_clock_that_was_wrong_for_a_moment_expires_nothing(set_by):
    """A message is started while a broker leads whose clock is wrong; the next tick has another one's time."""
    log = Log()
    assert log.pass_by(1000) == []
    log.now += 3_600_000
    log.set_by = set_by
    log.start(1, 4000)
    log.read_all()
    log.set_by = 0
    assert log.pass_by(3800) == []
    assert log.pass_by(4000) == [1]


def test_a_batch_has_limits():
    """A batch has at most so many messages, and hardly more than so many bytes."""
    log = Log()
    for number in range(10):
        log.start(number, 1)
    log.now += 1000
    log.tick()
    log.read_all()
    assert len(log.markers.take_expired(4, 10**6)) == 4
    assert len(log.markers.take_expired(4, 1)) == 1
    assert log.markers.has_expired


def test_the_attempt_and_reason_of_a_message_given_back():
    """A keep-alive's attempt replaces the start marker's, and its reason is kept."""
    log = Log()
    log.start(1, 10_000)
    log.keep_alive(1, 0, attempt=0, reason="closed")
    log.tick()
    log.read_all()
    (entry,) = log.markers.take_expired(*MANY)
    assert (entry.attempt, entry.reason) == (0, "closed")


STEP = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 5), st.integers(0, 900)),
    st.tuples(st.just("keep"), st.integers(0, 5), st.integers(0, 900)),
    st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("pass"), st.integers(1, 600), st.just(0)),
    st.tuples(st.just("read"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("judge"), st.just(0), st.just(0)),
)


@given(st.lists(STEP, max_size=60))
def test_only_what_is_expired_in_the_log_is_handed_out(steps):
    """A message handed out has neither ended nor been kept alive in the log up to the tick, however late it is read."""
    log, state = Log(), {}
    at_tick = {}
    for what, number, after in steps:
        if what == "start":
            log.start(number, after)
            state[number] = log.now + after
        elif what == "keep":
            log.keep_alive(number, after)
            state[number] = log.now + after if number in state else None
            state = {key: deadline for key, deadline in state.items() if deadline is not None}
        elif what == "end":
            log.end(number)
            state.pop(number, None)
        elif what == "pass":
            log.now += number
        elif what == "read":
            log.read_all(number)
        elif log.markers.wants_tick(log.now):
            log.tick()
            at_tick = {key for key, deadline in state.items() if deadline <= log.now + 1}
        taken = log.markers.take_expired(*MANY)
        assert {entry.message_id[1] for entry in taken} <= set(at_tick)
        log.markers.finish(taken)
        for entry in taken:
            log.end(entry.message_id[1])
            state.pop(entry.message_id[1], None)


@pytest.mark.parametrize("later", [False, True])
def test_a_deadline_beyond_all_bounds_is_cut(later, caplog):
    """A marker that asks for 2^64-1 ms, to start with or later, gets the longest there is; the log says so once."""
    log = Log(longest=60_000)
    for number in range(3):
        log.start(number, 100 if later else 2**64 - 1)
        if later:
            log.keep_alive(number, 2**64 - 1)
    log.read_all()
    log.now += 59_000
    log.tick()
    log.read_all()
    assert log.take() == []
    log.now += 2_000
    log.tick()
    log.read_all()
    assert sorted(log.take()) == [0, 1, 2]
    assert len([line for line in caplog.messages if "60000 ms" in line]) == 1


def test_markers_of_another_version_are_left_alone(caplog):
    """A marker of an unknown version is counted and has no effect; the log says so once."""
    log = Log()
    log.start(1, 100)
    for kind in (wire.START, wire.END, wire.KEEPALIVE):
        place = wire.MessageID(partition=0, offset=1)
        log.append(wire.Marker(version=7, type=kind, message_id=place, redeliver_after_ms=10**6).SerializeToString())
    log.read_all()
    log.now += 1000
    log.tick()
    log.read_all()
    assert log.take() == [1]
    assert log.markers.unreadable == 3
    assert [line for line in caplog.messages if "version" in line] == caplog.messages
    assert len(caplog.messages) == 1
