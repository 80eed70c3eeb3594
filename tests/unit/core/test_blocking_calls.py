"""Nobody waits without a deadline: a call that may wait says for how long, or has an entry that says what ends it."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.unit.core.blocking_calls import blocking_calls, calls_of

_TABLE = Path(__file__).with_name("blocking_calls.toml")


def entries():
    """Return the table's entries."""
    return tomllib.loads(_TABLE.read_text())["bound"]


def patterns():
    """Return all places of the table."""
    return [pattern for entry in entries() for pattern in entry["calls"]]


def test_every_call_that_may_wait_has_a_bound():
    """A new call that waits needs a timeout as an argument, or an entry in the table."""
    known = patterns()
    unknown = [f"{call.place} (line {call.line})" for call in blocking_calls() if not _is_known(call.place, known)]
    assert not unknown, f"say in {_TABLE.name} what bounds these calls, or give them a timeout"


def test_every_entry_is_of_a_call():
    """An entry whose call is gone goes, too."""
    places = [call.place for call in blocking_calls()]
    stale = [pattern for pattern in patterns() if not any(fnmatchcase(place, pattern) for place in places)]
    assert not stale


def test_every_entry_says_bound_and_reason():
    """An entry has places, a bound and where that is kept, and nothing else."""
    for entry in entries():
        assert set(entry) == {"calls", "bound", "how"}
        assert all(entry.values())


def test_connections_of_our_own_are_bounded_ones():
    """No code of ours connects with psycopg itself, but for a store of payloads, whose calls are watched."""
    plain = [call.place for call in blocking_calls() if call.callee.endswith("psycopg.connect")]
    assert plain == ["outbox_core/claims/stores.py store_of psycopg.connect"]


@pytest.mark.parametrize(
    "line",
    [
        "future.result()",
        "future.result(None)",
        "future.result(timeout)",
        "future.result(timeout=timeout)",
        "event.wait()",
        "thread.join()",
        "queue.get()",
        "lock.acquire()",
        "consumer.poll()",
        "consumer.consume(100)",
        "producer.flush()",
        "producer.init_transactions()",
        "admin.list_topics('t')",
        "consumer.committed(places)",
        "consumer.commit(asynchronous=False)",
        "consumer.close()",
        "connection.execute('SELECT 1')",
        "psycopg.connect(dsn)",
        "client.recv(100)",
        "subprocess.run(['ls'])",
        "urlopen(url)",
    ],
)
def test_calls_without_a_time_are_found(line):
    """Each kind of wait is found in a function whose timeout may be None."""
    assert list(calls_of(f"def f(timeout: float | None = None):\n    {line}\n", "f.py"))


@pytest.mark.parametrize(
    "line",
    [
        "future.result(5)",
        "future.result(timeout=seconds)",
        "event.wait(seconds)",
        "', '.join(names)",
        "names.get('a')",
        "lock.acquire(blocking=False)",
        "consumer.consume(100, seconds)",
        "admin.list_topics(timeout=seconds)",
        "consumer.committed(places, seconds)",
        "time.sleep(1)",
    ],
)
def test_calls_with_a_time_are_not(line):
    """What says for how long it waits, or does not wait at all, needs no entry."""
    assert not list(calls_of(f"def f(seconds: float):\n    {line}\n", "f.py"))


def test_lock_that_is_held_over_a_wait_is_found():
    """A lock under which another call may wait is a wait of everybody else."""
    source = "def f(self):\n    with self._lock:\n        self.done.wait(5)\n"
    assert [call.callee for call in calls_of(source, "f.py")] == ["withself._lock"]


def _is_known(place, known):
    return any(fnmatchcase(place, pattern) for pattern in known)
