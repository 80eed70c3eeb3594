"""Signals between an application and the harvesters embedded in it."""

import importlib
import sys

import pytest

from outbox_core import commit_signal


def test_every_subscriber_is_notified():
    """Every subscriber is notified; unsubscribing ends one of them, and may be repeated."""
    heard = []
    unsubscribe_first = commit_signal.subscribe(lambda: heard.append("first"))
    unsubscribe_second = commit_signal.subscribe(lambda: heard.append("second"))
    commit_signal.notify()
    assert heard == ["first", "second"]
    unsubscribe_first()
    unsubscribe_first()
    commit_signal.notify()
    assert heard == ["first", "second", "second"]
    unsubscribe_second()
    commit_signal.notify()
    assert len(heard) == 3


def test_one_callback_may_subscribe_twice():
    """Unsubscribing one of a callback's two subscriptions keeps the other."""
    heard = []

    def note():
        heard.append(1)

    first, second = commit_signal.subscribe(note), commit_signal.subscribe(note)
    first()
    commit_signal.notify()
    assert heard == [1]
    second()


def test_no_subscribers():
    """`has_subscribers` is true only while a callback is subscribed."""
    assert not commit_signal.has_subscribers()
    unsubscribe = commit_signal.subscribe(lambda: None)
    assert commit_signal.has_subscribers()
    unsubscribe()
    assert not commit_signal.has_subscribers()


def test_old_name_is_deprecated():
    """`doorbell.ring` still notifies, with a warning at the import."""
    sys.modules.pop("outbox_core.doorbell", None)
    with pytest.warns(DeprecationWarning, match="commit_signal"):
        doorbell = importlib.import_module("outbox_core.doorbell")
    assert doorbell.ring is commit_signal.notify
