"""The hand-out of messages: bounds, order, waiting and stopping, without Kafka."""

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox_queue.handout import Handout
from outbox_queue.headers import NOTHING
from outbox_queue.message import Message

PATIENCE = 30.0
NEVER = float("inf")


def make(concurrency=None, most=100, capacity=100):
    """A hand-out with room for everything, unless told otherwise."""
    return Handout(concurrency=concurrency, max_in_progress=most, capacity=capacity, processing_seconds=3600)


def messages(number):
    """New messages, whose deadline does not come."""
    new = [Message(None, "q", b"", (0, n), NOTHING, enqueued_at_ms=0, max_attempts=None) for n in range(number)]
    for message in new:
        message._deadline = NEVER
    return new


class HandoutMachine(RuleBasedStateMachine):
    """Any sequence of offering, taking and settling, beside a model of two lists."""

    def __init__(self):
        super().__init__()
        self.handout = make(concurrency=5, most=12, capacity=8)
        self.waiting, self.out = [], []

    @rule(share=st.floats(0, 1), more=st.booleans())
    def offer(self, share, more):
        fresh = messages(round(self.handout.wait_for_room(0) * share))
        assert self.handout.offer(fresh, there_are_more=more)
        self.waiting += fresh

    @rule(most=st.integers(1, 10))
    def take(self, most):
        taken = self.handout.take_many(most, 0)
        assert taken == self.waiting[: min(most, 5 - len(self.out))]
        del self.waiting[: len(taken)]
        self.out += taken

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 100))
    def settle(self, which):
        message = self.out.pop(which % len(self.out))
        assert self.handout.settle(message)
        assert not self.handout.settle(message)

    @rule()
    def stop(self):
        self.handout.stop()
        assert self.handout.take(0) is None
        assert not self.handout.offer(messages(1), there_are_more=False)
        assert self.handout.release() == self.waiting
        self.__init__()

    @invariant()
    def counts(self):
        assert self.handout.in_progress == len(self.waiting) + len(self.out) <= 12
        assert self.handout.handed_out == len(self.out) <= 5
        assert len(self.waiting) <= 8


HandoutMachine.TestCase.settings = settings(max_examples=100, deadline=None)
TestHandout = HandoutMachine.TestCase


def test_few_are_fetched_ahead_until_all_are_taken_quickly():
    """The number of messages ahead begins small, doubles while consumers wait, and halves when messages wait."""
    handout = make(capacity=64)
    assert handout.wait_for_room(0) == 8
    for _ in range(5):
        handout.offer(messages(handout.wait_for_room(0)), there_are_more=True)
        for message in handout.take_many(1000, 0):
            handout.settle(message)
    assert handout.wait_for_room(0) == 64
    handout.offer(messages(64), there_are_more=True)
    assert handout.wait_for_room(0) == 0
    time.sleep(1.1)
    for message in handout.take_many(64, 0):
        handout.settle(message)
    assert handout.wait_for_room(0) == 32


def test_a_take_waits_for_an_offer_and_for_room():
    """Who waits in `take` gets what is offered later, or what a settled message makes room for."""
    handout = make(concurrency=1)
    taken = []
    threads = [threading.Thread(target=lambda: taken.append(handout.take(PATIENCE))) for _ in range(2)]
    for thread in threads:
        thread.start()
    offered = messages(2)
    handout.offer(offered, there_are_more=False)
    _until(lambda: taken == offered[:1])
    handout.settle(offered[0])
    _until(lambda: taken == offered)
    for thread in threads:
        thread.join(PATIENCE)


def test_stop_and_failure_wake_who_waits():
    """`stop` ends a waiting `take` with None, `fail` with the error, and `wait_for_room` with 0."""
    handout = make()
    answers = []

    def take():
        try:
            answers.append(handout.take(None))
        except ValueError as error:
            answers.append(error)

    for wake in (lambda: handout.fail(ValueError("broken")), handout.stop):
        thread = threading.Thread(target=take)
        thread.start()
        wake()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert isinstance(answers[0], ValueError)
    assert handout.wait_for_room(PATIENCE) == 0
    with pytest.raises(ValueError, match="broken"):
        handout.take(0)


def test_hung_messages_free_their_places():
    """A message past its processing time and its deadline is dropped; a later settling does nothing."""
    handout = Handout(concurrency=1, max_in_progress=2, capacity=2, processing_seconds=0)
    offered = messages(2)
    handout.offer(offered, there_are_more=False)
    hung = handout.take(0)
    now = time.monotonic() + 1
    hung._deadline = now
    assert handout.drop_hung(now) == [hung]
    assert not handout.settle(hung)
    assert handout.take(0) is offered[1]


def test_a_hung_handler_keeps_nothing_for_itself():
    """What waits behind a hung handler is withdrawn after its processing time, and nothing is fetched until a take."""
    handout = Handout(concurrency=1, max_in_progress=10, capacity=10, processing_seconds=60)
    offered = messages(3)
    handout.offer(offered, there_are_more=True)
    handout.take(0)
    now = time.monotonic()
    assert handout.withdraw(now) == []
    assert handout.withdraw(now + 61) == offered[1:]
    assert handout.in_progress == handout.handed_out == 1
    assert handout.wait_for_room(0) == 0
    assert handout.take(0) is None
    assert handout.wait_for_room(0) > 0


def test_nothing_is_fetched_after_a_hung_message_until_a_take():
    """A handler that hung may hang for ever; who takes by being told is told, and makes room by asking."""
    handout = Handout(concurrency=1, max_in_progress=10, capacity=10, processing_seconds=0)
    calls = []
    handout.offer(messages(1), there_are_more=False)
    hung = handout.take(0)
    hung._deadline = 0.0
    handout.listen(lambda: calls.append(1))
    assert handout.drop_hung(time.monotonic() + 1) == [hung]
    assert handout.wait_for_room(0) == 0
    assert calls
    assert handout.take(0) is None
    assert handout.wait_for_room(0) > 0


def test_who_waits_to_take_keeps_the_room():
    """While somebody waits for a message, a hung one does not keep others from being fetched."""
    handout = Handout(concurrency=2, max_in_progress=10, capacity=10, processing_seconds=0)
    handout.offer(messages(1), there_are_more=False)
    handout.take(0)._deadline = 0.0
    thread = threading.Thread(target=handout.take, args=(PATIENCE,))
    thread.start()
    _until(lambda: handout._takers)
    assert len(handout.drop_hung(time.monotonic() + 1)) == 1
    assert handout.wait_for_room(0) > 0
    handout.stop()
    thread.join(PATIENCE)


def test_a_message_past_its_deadline_is_not_handed_out():
    """What others may have by now is withdrawn, found by a take or not; the next message is taken."""
    handout = make()
    offered = messages(4)
    offered[0]._deadline = offered[3]._deadline = 0.0
    handout.offer(offered, there_are_more=False)
    assert handout.take(0) is offered[1]
    assert handout.in_progress == 3
    assert handout.withdraw(time.monotonic()) == [offered[0], offered[3]]
    assert handout.withdraw(time.monotonic()) == []
    assert handout.take(0) is offered[2]
    assert handout.take(0) is None
    assert handout.in_progress == handout.handed_out == 2


def test_what_was_late_is_released_too():
    """A message that was found late just before the end is given back with those that waited."""
    handout = make()
    offered = messages(2)
    offered[0]._deadline = 0.0
    handout.offer(offered, there_are_more=False)
    assert handout.take_many(1, 0) == [offered[1]]
    handout.stop()
    assert handout.release() == [offered[0]]


def test_listeners_hear_of_every_chance():
    """A listener is called for an offer, for a place that got free, and for the stop."""
    handout = make(concurrency=1)
    calls = []
    handout.listen(lambda: calls.append(1))
    handout.offer(messages(2), there_are_more=False)
    assert len(calls) == 1
    handout.settle(handout.take(0))
    assert len(calls) == 2
    handout.stop()
    assert len(calls) == 3


def _until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
