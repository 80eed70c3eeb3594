"""The contract of every LeaderElector.

A suite derives from `ElectorContract`, makes electors in the fixture `elector_factory` that contend
with no others, and inherits the tests.
"""

import threading
import time

import pytest

from outbox_core.election import Neli, NeliConfig, now
from outbox_core.events import LeaderAcquired, LeaderRevoked


class ElectorContract:
    @pytest.fixture
    def elector_factory(self):
        """Return a function that makes an elector, which passes its events to the given handler."""
        raise NotImplementedError

    @pytest.fixture
    def start(self, elector_factory):
        """Yield a function that makes and starts an elector, and waits until it leads; each is stopped at the end."""
        started = []

        def make(on_event):
            elector = elector_factory(on_event)
            started.append(elector)
            elector.start()
            deadline = time.monotonic() + 20
            while elector.leadership is None:
                assert time.monotonic() < deadline, f"never led: {elector.failure}"
                time.sleep(0.005)
            return elector

        yield make
        for elector in started:
            elector.stop()

    def test_nothing_before_the_start(self, elector_factory):
        """An elector that was not started does not lead and has not failed; stopping it does nothing."""
        events = []
        elector = elector_factory(events.append)
        assert elector.leadership is None
        assert elector.failure is None
        assert elector.trouble is None
        elector.stop()
        assert events == []

    def test_acquired_with_a_running_lease(self, start):
        """LeaderAcquired carries the ID and the term of the lease, which still runs."""
        told = threading.Event()
        seen = []

        def on_event(event):
            if isinstance(event, LeaderAcquired):
                seen.append(event)
                told.set()

        elector = start(on_event)
        assert told.wait(5)
        [event] = seen
        lease = elector.leadership
        assert (lease.leader_id, lease.term) == (event.leader_id, event.term)
        assert lease.deadline > now()

    def test_no_trouble_while_it_leads(self, start):
        """An elector that leads, or was stopped, reports no trouble."""
        elector = start(lambda _: None)
        assert elector.trouble is None
        elector.stop()
        assert elector.trouble is None

    def test_lease_goes_on(self, start):
        """A leader's lease is renewed by itself, under the same leader ID."""
        elector = start(lambda _: None)
        first = elector.leadership
        deadline = time.monotonic() + 10
        while elector.leadership.deadline <= first.deadline:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert elector.leadership.leader_id == first.leader_id

    def test_stop_revokes_once(self, start):
        """A stop sends LeaderRevoked once, with the lease still readable in the handler and gone afterwards."""
        events = []
        readable = []

        def on_event(event):
            events.append(event)
            if isinstance(event, LeaderRevoked):
                readable.append(elector.leadership.leader_id)

        elector = start(on_event)
        leader_id = elector.leadership.leader_id
        elector.stop()
        elector.stop()
        assert [type(event) for event in events] == [LeaderAcquired, LeaderRevoked]
        assert {event.leader_id for event in events} == {leader_id}
        assert readable == [leader_id]
        assert elector.leadership is None
        assert elector.failure is None

    def test_stop_waits_for_the_handler(self, start):
        """`stop` returns only after the handler of LeaderRevoked has."""
        done = []

        def drain(event):
            if isinstance(event, LeaderRevoked):
                time.sleep(0.3)
                done.append(event)

        start(drain).stop()
        assert len(done) == 1

    def test_stepping_down_revokes(self, start):
        """Who steps down hands over soon, with a LeaderRevoked of its leader ID, and says why it does not lead."""
        told = threading.Event()
        events = []

        def on_event(event):
            events.append(event)
            if isinstance(event, LeaderRevoked):
                told.set()

        elector = start(on_event)
        leader_id = elector.leadership.leader_id
        elector.step_down("the database does not answer", lambda: False)
        assert told.wait(10)
        assert [event.leader_id for event in events] == [leader_id, leader_id]
        deadline = time.monotonic() + 10
        while elector.leadership is not None or "the database does not answer" not in (elector.trouble or ""):
            assert time.monotonic() < deadline, elector.trouble
            time.sleep(0.01)
        elector.stop()
        assert len(events) == 2

    def test_handlers_may_fail(self, start):
        """An exception in a handler neither ends the elector nor hides later events."""
        events = []

        def fail(event):
            events.append(event)
            raise ZeroDivisionError

        elector = start(fail)
        elector.stop()
        assert [type(event) for event in events] == [LeaderAcquired, LeaderRevoked]
        assert elector.failure is None

    def test_leader_ids_are_never_used_again(self, start):
        """Each LeaderAcquired brings a new leader ID."""
        ids = set()
        for _ in range(2):
            elector = start(lambda _: None)
            ids.add(elector.leadership.leader_id)
            elector.stop()
        assert len(ids) == 2


class TestNeli(ElectorContract):
    @pytest.fixture
    def elector_factory(self, kafka_bootstrap, topic_name):
        """Return electors of one group on the shared broker."""
        group = topic_name("contract")

        def make(on_event):
            return Neli(NeliConfig(kafka={"bootstrap.servers": kafka_bootstrap}, group_id=group), on_event)

        return make
