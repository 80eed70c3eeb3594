"""Calls on connections of other drivers: watched, given up when they are late, and never another connection's."""

import logging
import os
import random
import socket
import threading
import time
from contextlib import suppress

import pytest

from outbox_core import watched_calls
from outbox_core.watched_calls import watched
from tests.harvesting import wait_until


class Wire:
    """A connection as drivers have it: `ask` waits for an answer, and the descriptor is closed when there is none."""

    def __init__(self):
        self._near, self.far = socket.socketpair()

    def fileno(self):
        return self._near.fileno()

    def ask(self):
        """Wait for a byte; raise ConnectionError at the end of the stream, as drivers do, and close first."""
        if not (answer := self._near.recv(1)):
            self._near.close()
            raise ConnectionError("server closed the connection unexpectedly")
        return answer

    def close(self):
        self._near.close()
        self.far.close()


@pytest.fixture
def wire():
    """Return a connection whose other side says nothing."""
    wire = Wire()
    yield wire
    wire.close()


def test_late_call_ends_with_the_drivers_error(wire, caplog):
    """A call without an answer ends at its deadline; one log line and a note of the error say so."""
    began = time.monotonic()
    with pytest.raises(ConnectionError) as caught, watched(wire, 0.2, "the result of a task"):
        wire.ask()
    assert time.monotonic() - began >= 0.2
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has not answered for 0 s (the result of a task); the connection was given up" in line
    assert caught.value.__notes__ == [line]


def test_call_that_is_answered_is_left_alone(wire, caplog):
    """A connection whose calls end in time is not touched, also not after the deadline that they had."""
    for _ in range(3):
        wire.far.send(b"x")
        with watched(wire, 0.1, "quick"):
            assert wire.ask() == b"x"
    time.sleep(0.3)
    wire.far.send(b"y")
    assert wire.ask() == b"y"
    assert not caplog.records


def test_connection_that_gets_the_descriptor_is_not_harmed(wire):
    """The driver closes its socket within the call, another connection gets the number: that one stays open."""
    with watched(wire, 0.2, "slow"):
        descriptor = wire.fileno()
        wire._near.close()
        other, end = socket.socketpair()
        assert descriptor in {other.fileno(), end.fileno()}
        time.sleep(0.5)
    with other, end:
        end.send(b"x")
        assert other.recv(1) == b"x"


def test_nested_and_parallel_calls_have_their_own_deadlines(caplog):
    """Of many calls at once those that are late are given up, and no others."""
    wires = [Wire() for _ in range(8)]
    ended = {}

    def call(number):
        try:
            with watched(wires[number], 0.2 if number % 2 else 30.0, f"call {number}"):
                ended[number] = wires[number].ask()
        except ConnectionError:
            ended[number] = None

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(ended) == 4, "the late ones end")
    for number in (0, 2, 4, 6):
        wires[number].far.send(b"x")
    for thread in threads:
        thread.join(10)
    assert ended == {number: None if number % 2 else b"x" for number in range(8)}
    assert len(caplog.records) == 4
    for wire in wires:
        wire.close()


def test_answers_at_the_moment_of_the_deadline(caplog):
    """However answers and deadlines meet, a call ends with one of both, and the next one is unharmed."""
    chance = random.Random(1)
    wire = Wire()
    for _ in range(150):
        answer = threading.Timer(chance.uniform(0.0, 0.02), _answer, [wire.far])
        caplog.clear()
        answer.start()
        try:
            with watched(wire, 0.01, "a close race"):
                assert wire.ask() == b"x"
        except ConnectionError:
            assert caplog.records
        answer.join()
        if caplog.records:
            wire.close()
            wire = Wire()
    wire.close()
    assert not watched_calls._watch._calls


def test_forked_process_watches_its_own_calls(wire):
    """A child has no thread of its parent's, and none of its calls; it starts a thread of its own."""
    with watched(wire, 30.0, "the parent's"):
        child = os.fork()
        if child == 0:
            mine = Wire()
            try:
                with watched(mine, 0.2, "the child's"):
                    mine.ask()
            except ConnectionError:
                os._exit(7)
            os._exit(1)
        _, status = wait_until(lambda: _ended(child), "the child ends")
        assert os.waitstatus_to_exitcode(status) == 7
        wire.far.send(b"x")
        assert wire.ask() == b"x"


def test_process_without_threads_goes_on_unwatched(wire, monkeypatch):
    """If no thread can be started the statement is sent all the same."""
    watch = watched_calls._Watch()
    monkeypatch.setattr(watched_calls, "_watch", watch)
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    wire.far.send(b"x")
    with watched(wire, 0.1, "alone"):
        assert wire.ask() == b"x"


def test_closed_and_unknown_connections_are_not_watched(wire, caplog):
    """A connection without a descriptor is used as it is."""
    wire.close()
    for connection in (wire, object()):
        with watched(connection, 0.0, "nothing"):
            pass
    caplog.set_level(logging.DEBUG)
    assert not caplog.records


def _ended(child):
    found = os.waitpid(child, os.WNOHANG)
    return found if found[0] else None


def _answer(end):
    with suppress(OSError):
        end.send(b"x")


def _refuse(_):
    raise RuntimeError("can't start new thread")
