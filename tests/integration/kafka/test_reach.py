"""Which brokers answer a client themselves, and how many members a group has: asked on three brokers, one link cut."""

import pytest

from devstack.ports import free_port
from devstack.processes import wait_until
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.admin import group_members
from outbox_core.kafka.clients import make_consumer
from outbox_core.kafka.reach import SilentBrokers, unreachable_brokers
from tests.resources import held, reference_counts_only


@pytest.fixture
def links(cluster):
    """The cluster behind a proxy for each broker."""
    with cluster.proxied(1) as proxies:
        yield proxies


def _nodes(names: list[str]) -> list[int]:
    return [int(name.split()[1]) for name in names]


@pytest.mark.real_broker
@pytest.mark.parametrize("fault", ["black hole", "refused"])
def test_a_broker_behind_a_cut_link_is_named(cluster, links, make_topic, fault):
    """Each broker is asked itself: the one whose link is cut is found, with the partitions that it leads."""
    topic = make_topic(3, bootstrap=cluster.bootstrap, replicas=3)
    for partition in range(3):
        cluster.move_leader(topic, partition, partition + 1)
    settings = {"bootstrap.servers": links.bootstrap}
    places = [(topic, 0), (topic, 1), (topic, 2), (topic, 9), ("no-such-topic", 0), ("no-such-topic", None)]
    silent = SilentBrokers(6.0)
    assert unreachable_brokers(settings, 20.0) == []
    assert SilentBrokers(20.0).leading(settings, places, 0.0) == []
    link = links.of[2]
    (link.cut if fault == "black hole" else link.reset)()
    try:
        with reference_counts_only():
            threads = held().threads
            named = unreachable_brokers(settings, 6.0)
            assert _nodes(named) == [2]
            assert named[0] == f"broker 2 at {link.bootstrap}"
            assert silent.leading(settings, places, 0.0) == named
            assert silent.leading(settings, [(topic, None)], 60.0) == named
            assert silent.leading(settings, [(topic, 0), (topic, 9), ("no-such-topic", None)], 60.0) == []
            assert wait_until(lambda: held().threads <= threads, 5), "a client was not closed"
    finally:
        link.restore()
        link.resume()
    assert unreachable_brokers(settings, 20.0) == []


def test_no_broker_at_all_is_an_outage():
    """Where nobody answers, no broker can be named."""
    nowhere = {"bootstrap.servers": f"127.0.0.1:{free_port()}", "transactional.id": "not-for-inquiries"}
    with pytest.raises(KafkaUnavailable, match="Connection refused"):
        unreachable_brokers(nowhere, 1.0)
    with pytest.raises(KafkaUnavailable, match="Connection refused"):
        SilentBrokers(1.0).leading(nowhere, [("orders", 0)], 0.0)


@pytest.mark.real_broker
def test_counts_the_members_of_a_group(kafka_bootstrap, make_topic, topic_name):
    """Kafka says how many members a group has, those included that got no partition; none if there is no such group."""
    topic, group = make_topic(1), topic_name("group")
    settings = {"bootstrap.servers": kafka_bootstrap}

    def members() -> int:
        found = group_members(settings, group, timeout_seconds=10.0)
        assert found is not None
        return len(found)

    assert members() == 0
    consumers = [make_consumer(settings | {"group.id": group}) for _ in range(2)]
    joined_ones = set()
    for consumer in consumers:
        consumer.subscribe([topic], on_assign=lambda one, _: joined_ones.add(id(one)))

    def joined() -> bool:
        for consumer in consumers:
            consumer.poll(0.1)
        # One that leaves while it is joining is a member until Kafka misses it.
        return len(joined_ones) == 2 and members() == 2

    assert wait_until(joined, 30)
    consumers[0].close()
    assert wait_until(lambda: members() == 1, 30)
    consumers[1].close()
    assert wait_until(lambda: members() == 0, 30)


def test_a_cluster_that_describes_no_group_does_not_say():
    """The mock cluster knows no such question: that is no answer, not an empty group."""
    mock = {"bootstrap.servers": "mock", "test.mock.num.brokers": 1}
    assert group_members(mock, "any", timeout_seconds=3.0) is None
