"""The waits of the harvest thread."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from outbox_core.errors import StoreUnavailable
from outbox_core.harvest import store_calls
from outbox_core.harvest.store_calls import LeadershipWait, StoreCall, StoreThread
from outbox_core.metrics import HarvestMetrics


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


def test_a_failed_call_is_not_repeated_before_its_backoff_is_over(monkeypatch):
    """After an outage no call starts for the time of the backoff; a success sets none."""
    time = [100.0]
    monkeypatch.setattr(store_calls, "now", lambda: time[-1])
    done = Future()
    ctx = SimpleNamespace(
        note_outage=lambda *_: 0.5, database=SimpleNamespace(recovered=lambda _: None), metrics=HarvestMetrics()
    )
    call = StoreCall(SimpleNamespace(submit=lambda _: done), ctx)
    call.start(lambda _: None)
    assert not call.can_start
    done.set_exception(StoreUnavailable("no answer"))
    with pytest.raises(StoreUnavailable):
        call.result()
    assert not call.can_start
    time.append(100.5)
    assert call.can_start


def test_each_call_that_ends_wakes_the_harvest_thread():
    """The harvest thread is woken after each call, that failed or not, and its store is closed after the last one."""
    ended, closed = threading.Semaphore(0), threading.Event()
    thread = StoreThread(SimpleNamespace(close=closed.set), "test-store", ended.release)
    for work in (lambda _: 1, lambda _: 1 / 0):
        thread.submit(work)
        assert ended.acquire(timeout=20)
    thread.close()
    assert closed.wait(20)
