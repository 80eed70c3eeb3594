"""The waits of the harvest thread."""

import threading
import time
from types import SimpleNamespace

from outbox_core.harvest.store_calls import LeadershipWait


def waiting(over=lambda: False):
    """Return a `LeadershipWait` and the event that wakes it."""
    wake = threading.Event()
    return LeadershipWait(over, SimpleNamespace(wake=wake)), wake


def test_pause_ends_with_a_signal():
    """A pause before the next poll ends with a signal."""
    subject, wake = waiting()
    wake.set()
    subject.pause(3600)
    assert not wake.is_set()


def test_backoff_does_not():
    """A backoff after a failure lasts its time, however many signals come."""
    subject, wake = waiting()
    stopping = threading.Event()

    def ring():
        while not stopping.wait(0.001):
            wake.set()

    ringing = threading.Thread(target=ring)
    ringing.start()
    began = time.monotonic()
    subject.back_off(0.3)
    assert time.monotonic() - began >= 0.29
    stopping.set()
    ringing.join()


def test_backoff_ends_with_the_leadership():
    """A backoff ends with the leadership."""
    over = threading.Event()
    subject, wake = waiting(over.is_set)

    def end():
        over.set()
        wake.set()

    timer = threading.Timer(0.05, end)
    timer.start()
    subject.back_off(3600)
    assert over.is_set()
