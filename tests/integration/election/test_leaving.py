"""Members that leave their group because they cannot lead, or cannot work, and come back: on brokers."""

import logging
import threading
import time

import pytest
from confluent_kafka.admin import AdminClient

from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.kafka.topics import ensure_leader_topic
from tests.integration.election.test_neli import contend, leads, until

pytestmark = pytest.mark.real_broker
__all__ = ["contend"]


def never():
    """Answer that it is not able."""
    return False


def test_who_steps_down_lets_another_lead(contend, caplog):
    """It hands over in order, stays out while it is not able, says so, and comes back as a standby."""
    caplog.set_level(logging.INFO, logger="outbox_core.election")
    is_able = threading.Event()
    ill, other = leads(contend(quick=True)), contend(quick=True)
    asked = time.monotonic()
    ill.step_down("its database does not answer", is_able.is_set)
    assert time.monotonic() - asked < 1
    leads(other)
    assert ill.kinds() == [LeaderAcquired, LeaderRevoked]
    assert ill.times(LeaderRevoked)[0] <= other.times(LeaderAcquired)[0]
    time.sleep(5.0)  # two sessions
    assert ill.is_out
    assert "its database does not answer; comes back when it is able again" in ill.trouble
    assert ill.hears_leader
    is_able.set()
    until(lambda: not ill.is_out)
    assert ill.trouble is None
    other.stop()
    leads(ill)
    assert other.kinds() == [LeaderAcquired, LeaderRevoked]
    lines = [record.getMessage() for record in caplog.records if "c0" in record.getMessage()]
    assert len([line for line in lines if "leaves leader group" in line]) == 1
    assert len([line for line in lines if "joins leader group" in line and "it is able again" in line]) == 1


def test_a_standby_that_cannot_work_steps_down(contend):
    """It leaves the group at once, and is not elected when the leader stops; somebody must try in the end."""
    leader, standby = leads(contend(quick=True)), contend(quick=True)
    standby.step_down("no database", never)
    until(lambda: standby.is_out)
    leader.stop()
    time.sleep(5.0)
    assert standby.events == []
    leads(standby)


def test_who_is_alone_leads_again(contend):
    """A group of one is without a leader until nobody was heard for a while; then it leads on, able or not."""
    alone = leads(contend(quick=True))
    alone.step_down("no database", never)
    until(lambda: alone.times(LeaderRevoked))
    until(lambda: alone.is_leader, timeout=30)
    until(lambda: len(alone.times(LeaderAcquired)) == 2)
    assert alone.times(LeaderAcquired)[1] - alone.times(LeaderRevoked)[0] > 9


def test_a_task_that_steps_down(contend):
    """A background task may say that it cannot work: it is not called while others lead, and again after that."""
    calls, is_able = [], threading.Event()

    def work():
        calls.append(time.monotonic())
        if len(calls) == 1:
            first.step_down("the first call failed", is_able.is_set)
        time.sleep(0.01)

    first, other = leads(contend(quick=True)), contend(quick=True)
    first.background(work)
    leads(other)
    assert first.kinds() == [LeaderAcquired, LeaderRevoked]
    while_out = len(calls)
    time.sleep(1.0)
    assert len(calls) == while_out
    is_able.set()
    until(lambda: not first.is_out)
    other.stop()
    until(lambda: len(calls) > while_out)


def test_a_question_that_hangs_does_not_hold_up_the_stop(contend):
    """`stop` returns although `is_able` has not."""
    is_asked, may_go = threading.Event(), threading.Event()

    def ask():
        is_asked.set()
        may_go.wait(60)

    ill = leads(contend(quick=True))
    ill.step_down("no database", ask)
    assert is_asked.wait(10)
    asked = time.monotonic()
    ill.stop()
    assert time.monotonic() - asked < 10
    assert not ill._thread.is_alive()
    may_go.set()


@pytest.mark.parametrize("way", ["hole", "refuse"])
def test_an_owner_that_cannot_reach_the_leader_topic(contend, cluster, topic_name, way):
    """Its link to one broker alone fails, and it keeps its group: its peer leads, and both go on after the repair."""
    group = topic_name("unable")
    ensure_leader_topic({"bootstrap.servers": cluster.bootstrap}, f"{group}.neli")
    with cluster.proxied(1) as ways:
        ill = leads(contend(quick=True, group_id=group, bootstrap=ways.bootstrap))
        peer = contend(quick=True, group_id=group, bootstrap=cluster.bootstrap)
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        coordinator = admin.describe_consumer_groups([group])[group].result(30).coordinator.id
        victim = next(number for number in cluster.brokers if number != coordinator)
        cluster.move_leader(f"{group}.neli", 0, victim)
        until(lambda: ill.is_leader, timeout=30)
        cut_at = time.monotonic()
        link = ways.of[victim]
        link.cut() if way == "hole" else link.reset()
        until(lambda: peer.is_leader, timeout=40)
        print(f"the peer leads {time.monotonic() - cut_at:.1f} s after the cut")  # noqa: T201
        assert not ill.is_leader
        assert ill.kinds()[-1] is LeaderFenced
        until(lambda: ill.is_out)
        assert "comes back when a message of its own comes back from the leader topic" in ill.trouble
        time.sleep(5.0)
        assert ill.is_out
        assert peer.kinds() == [LeaderAcquired]
        link.restore() if way == "hole" else link.resume()
        until(lambda: not ill.is_out, timeout=30)
        time.sleep(1.0)
        assert peer.kinds() == [LeaderAcquired]
        assert peer.is_leader
        peer.stop()
        leads(ill)
