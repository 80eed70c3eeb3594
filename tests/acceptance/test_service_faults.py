"""Kafka and Postgres die under load, and come back. The services are this module's own."""

import time

from devstack.processes import wait_until
from outbox_core.election import now


def _wait_for_progress(site):
    """Seconds until the next record leaves the outbox."""
    since, harvested = now(), site.load.harvested()
    assert wait_until(lambda: site.load.harvested() > harvested, timeout=60, interval=0.1), site.fleet.tails()
    return now() - since


def test_broker_killed(make_site, private_stack, private_database, say):
    """SIGKILL of the broker, for less and for more than a session: nothing lost or reversed, one leader at a time."""
    site = make_site("broker", private_database, private_stack.kafka.bootstrap)
    site.start(harvesters=3)
    for outage in (0, 7):
        site.fleet.leader()
        site.load.burst(600)
        time.sleep(0.1)
        private_stack.kafka.kill()
        time.sleep(outage)
        private_stack.kafka.start()
        say(f"broker back -> next purge: {_wait_for_progress(site):.2f} s")
    verdict = site.settle()
    say(str(verdict))
    verdict.assert_in_order()
    site.assert_one_leader()


def test_postgres_restarted(make_site, private_stack, private_database, say):
    """Postgres restarted with `immediate`, three times: nothing lost or reversed, and leadership stays where it is."""
    site = make_site("postgres", private_database, private_stack.kafka.bootstrap)
    site.start(harvesters=2)
    for _ in range(3):
        site.fleet.leader()
        site.load.burst(600)
        time.sleep(0.1)
        private_stack.postgres.restart("immediate")
        say(f"Postgres back -> next purge: {_wait_for_progress(site):.2f} s")
    verdict = site.settle()
    say(str(verdict))
    verdict.assert_in_order()
    site.assert_one_leader()
    assert len(site.fleet.terms()) == 1
