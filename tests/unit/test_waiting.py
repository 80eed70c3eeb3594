"""How the harvest thread waits."""

import threading
import time
from types import SimpleNamespace

from outbox_core.harvest.waiting import Waiting


def waiting(over=lambda: False):
    """A `Waiting` and the event that wakes it."""
    wake = threading.Event()
    return Waiting(over, SimpleNamespace(io_error_backoff=0.1), SimpleNamespace(wake=wake)), wake


def test_pause_ends_with_news():
    """A pause before the next look ends as soon as something happens."""
    subject, wake = waiting()
    wake.set()
    subject.pause(3600)
    assert not wake.is_set()


def test_rest_does_not():
    """A rest after a failure lasts its time, however much news comes in."""
    subject, wake = waiting()
    stopping = threading.Event()

    def ring():
        while not stopping.wait(0.001):
            wake.set()

    ringing = threading.Thread(target=ring)
    ringing.start()
    began = time.monotonic()
    subject.rest(0.3)
    assert time.monotonic() - began >= 0.29
    stopping.set()
    ringing.join()


def test_rest_ends_with_the_leadership():
    """Nobody rests on after the end of the leadership."""
    over = threading.Event()
    subject, wake = waiting(over.is_set)

    def end():
        over.set()
        wake.set()

    timer = threading.Timer(0.05, end)
    timer.start()
    subject.rest(3600)
    assert over.is_set()
