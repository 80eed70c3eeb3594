"""The prefetch buffer: bounds, order, waiting and stopping, without Kafka."""

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox_core import election
from outbox_queue.consuming.buffer import PrefetchBuffer
from tests.queueing import delivery, eventually

PATIENCE = 30.0


def make(concurrency=None, most=100, capacity=100):
    """Return a buffer with capacity for all messages, unless limited."""
    return PrefetchBuffer(concurrency=concurrency, max_in_progress=most, capacity=capacity, processing_seconds=3600)


def messages(number):
    """Return new messages, whose deadline does not come."""
    return [delivery(place=(0, n)) for n in range(number)]


def get(buffer, seconds=0.0):
    """Return the next message, None if there is none."""
    return next(iter(buffer.get(1, seconds)), None)


class BufferMachine(RuleBasedStateMachine):
    """A model of two lists, beside any sequence of put, get and settle."""

    def __init__(self):
        super().__init__()
        self.buffer = make(concurrency=5, most=12, capacity=8)
        self.waiting, self.out = [], []

    @rule(share=st.floats(0, 1), more=st.booleans())
    def put(self, share, more):
        fresh = messages(round(self.buffer.capacity(0) * share))
        assert self.buffer.put(fresh, there_are_more=more)
        self.waiting += fresh

    @rule(most=st.integers(1, 10))
    def get(self, most):
        received = self.buffer.get(most, 0)
        assert received == self.waiting[: min(most, 5 - len(self.out))]
        del self.waiting[: len(received)]
        self.out += received

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 100))
    def settle(self, which):
        message = self.out.pop(which % len(self.out))
        assert self.buffer.settle(message)
        assert not self.buffer.settle(message)

    @rule()
    def stop(self):
        self.buffer.stop()
        assert get(self.buffer) is None
        assert not self.buffer.put(messages(1), there_are_more=False)
        assert self.buffer.remove_waiting() == self.waiting
        self.__init__()

    @invariant()
    def counts(self):
        assert self.buffer.in_progress == len(self.waiting) + len(self.out) <= 12
        assert self.buffer.received == len(self.out) <= 5
        assert len(self.waiting) <= 8


BufferMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestBuffer = BufferMachine.TestCase


def test_few_are_fetched_ahead_until_all_are_received_quickly():
    """The number of messages ahead begins small, doubles while consumers wait, and halves when messages wait."""
    buffer = make(capacity=64)
    assert buffer.capacity(0) == 8
    for _ in range(5):
        buffer.put(messages(buffer.capacity(0)), there_are_more=True)
        for message in buffer.get(1000, 0):
            buffer.settle(message)
    assert buffer.capacity(0) == 64
    buffer.put(messages(64), there_are_more=True)
    assert buffer.capacity(0) == 0
    time.sleep(1.1)
    for message in buffer.get(64, 0):
        buffer.settle(message)
    assert buffer.capacity(0) == 32


def test_a_get_waits_for_a_put_and_for_capacity():
    """A waiting `get` returns a message once it is put, or once a settled one makes a place for it."""
    buffer = make(concurrency=1)
    received = []
    threads = [threading.Thread(target=lambda: received.append(get(buffer, PATIENCE))) for _ in range(2)]
    for thread in threads:
        thread.start()
    new = messages(2)
    buffer.put(new, there_are_more=False)
    eventually(lambda: received == new[:1])
    buffer.settle(new[0])
    eventually(lambda: received == new)
    for thread in threads:
        thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("end", "answer"),
    [
        pytest.param(PrefetchBuffer.stop, "no message", id="stop"),
        pytest.param(lambda buffer: buffer.fail(ValueError("broken")), "broken", id="fail"),
    ],
)
def test_stop_and_failure_wake_who_waits(end, answer):
    """`stop` ends a waiting `get`, and later ones, without a message, `fail` with the error; then `capacity` is 0."""
    buffer, answers = make(), []

    def receive():
        try:
            answers.append(get(buffer, None) or "no message")
        except ValueError as error:
            answers.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    eventually(lambda: buffer._receivers)
    end(buffer)
    thread.join(PATIENCE)
    receive()
    assert answers == [answer, answer]
    buffer.stop()
    assert buffer.capacity(PATIENCE) == 0


def test_hung_messages_free_their_places():
    """A message past its processing time and its deadline is removed; a later settling has no effect."""
    buffer = PrefetchBuffer(concurrency=1, max_in_progress=2, capacity=2, processing_seconds=0)
    new = messages(2)
    buffer.put(new, there_are_more=False)
    hung = get(buffer)
    now = election.now() + 1
    hung.deadline = now
    assert buffer.remove_hung(now) == [hung]
    assert not buffer.settle(hung)
    assert get(buffer) is new[1]


def test_a_hung_handler_keeps_nothing_for_itself():
    """Messages behind a hung handler are overdue after the processing time, and capacity is 0 until a `get`."""
    buffer = PrefetchBuffer(concurrency=1, max_in_progress=10, capacity=10, processing_seconds=60)
    new = messages(3)
    buffer.put(new, there_are_more=True)
    get(buffer)
    now = election.now()
    assert buffer.remove_overdue(now) == []
    assert buffer.remove_overdue(now + 61) == new[1:]
    assert buffer.in_progress == buffer.received == 1
    assert buffer.capacity(0) == 0
    assert get(buffer) is None
    assert buffer.capacity(0) > 0


def test_nothing_is_fetched_after_a_hung_message_until_a_get():
    """After a hung message capacity is 0 until a `get`, as its handler may hang for ever; listeners are called."""
    buffer = PrefetchBuffer(concurrency=1, max_in_progress=10, capacity=10, processing_seconds=0)
    calls = []
    buffer.put(messages(1), there_are_more=False)
    hung = get(buffer)
    hung.deadline = 0.0
    buffer.listen(lambda: calls.append(1))
    assert buffer.remove_hung(election.now() + 1) == [hung]
    assert buffer.capacity(0) == 0
    assert calls
    assert get(buffer) is None
    assert buffer.capacity(0) > 0


def test_a_waiting_get_keeps_the_capacity():
    """While a thread waits for a message, a hung one does not take the capacity."""
    buffer = PrefetchBuffer(concurrency=2, max_in_progress=10, capacity=10, processing_seconds=0)
    buffer.put(messages(1), there_are_more=False)
    get(buffer).deadline = 0.0
    thread = threading.Thread(target=get, args=(buffer, PATIENCE))
    thread.start()
    eventually(lambda: buffer._receivers)
    assert len(buffer.remove_hung(election.now() + 1)) == 1
    assert buffer.capacity(0) > 0
    buffer.stop()
    thread.join(PATIENCE)


def test_a_message_past_its_deadline_is_not_received():
    """A message past its deadline is not received but overdue, found by a `get` or not; the next one is received."""
    buffer = make()
    new = messages(4)
    new[0].deadline = new[3].deadline = 0.0
    buffer.put(new, there_are_more=False)
    assert get(buffer) is new[1]
    assert buffer.in_progress == 3
    assert buffer.remove_overdue(election.now()) == [new[0], new[3]]
    assert buffer.remove_overdue(election.now()) == []
    assert get(buffer) is new[2]
    assert get(buffer) is None
    assert buffer.in_progress == buffer.received == 2


def test_a_deadline_passes_while_the_machine_sleeps(monkeypatch):
    """A message that waited while the machine was suspended past its deadline is overdue: trackers did not sleep."""
    buffer, clock = make(), time.clock_gettime
    (late,) = new = [delivery(deadline=election.now() + 60)]
    buffer.put(new, there_are_more=False)
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 61)
    assert get(buffer) is None
    assert buffer.remove_overdue(election.now()) == [late]


def test_what_was_overdue_is_returned_too():
    """A message that was found overdue just before the end is returned with those that waited."""
    buffer = make()
    new = messages(2)
    new[0].deadline = 0.0
    buffer.put(new, there_are_more=False)
    assert buffer.get(1, 0) == [new[1]]
    buffer.stop()
    assert buffer.remove_waiting() == [new[0]]


def test_listeners_hear_of_every_chance():
    """A listener is called for a put, for a freed place, and for the stop."""
    buffer = make(concurrency=1)
    calls = []
    buffer.listen(lambda: calls.append(1))
    buffer.put(messages(2), there_are_more=False)
    assert len(calls) == 1
    buffer.settle(get(buffer))
    assert len(calls) == 2
    buffer.stop()
    assert len(calls) == 3
