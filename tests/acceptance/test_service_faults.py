"""Kafka and Postgres die under load and come back (services of this module's own), or are cut off by a proxy."""

import random
import time

import pytest

from devstack.ports import LOCALHOST
from devstack.processes import wait_until
from devstack.proxy import TcpProxy
from outbox_core.election import now

pytestmark = [pytest.mark.alone, pytest.mark.real_broker]


def _wait_for_progress(site):
    """Wait until the next record leaves the outbox; return the seconds."""
    since, harvested = now(), site.load.harvested()
    assert wait_until(lambda: site.load.harvested() > harvested, timeout=60, interval=0.1), site.fleet.tails()
    return now() - since


@pytest.mark.parametrize("outage", [pytest.param(0, marks=pytest.mark.complete), 5])
def test_broker_killed(make_site, private_stack, private_database, say, outage):
    """A broker killed for less or more than a session loses and reverses no record, and one process leads at a time."""
    site = make_site("broker", private_database, private_stack.kafka.bootstrap)
    site.start(harvesters=3)
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
    """Two immediate restarts of Postgres lose and reverse no record, and do not move the leadership."""
    site = make_site("postgres", private_database, private_stack.kafka.bootstrap)
    site.start(harvesters=2)
    for _ in range(2):
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


def test_database_cut(make_site, postgres, database, kafka_bootstrap, say):
    """Connections that break while statements run, and then commit unseen, lose, reverse and block no record."""
    slow = {"records_per_second": 100}
    with TcpProxy(LOCALHOST, postgres.port) as proxy:
        via = database.replace(f":{postgres.port}/", f":{proxy.port}/")
        site = make_site("cut", database, kafka_bootstrap, via=via, load=slow)
        for statement in ("UPDATE", "DELETE"):
            site.load.slow_down(statement, 0.1)
        site.start(harvesters=2)
        for _ in range(2):
            site.fleet.leader()
            site.load.burst(150)
            time.sleep(random.uniform(0.1, 0.4))
            proxy.cut(drop=True)
            time.sleep(0.5)  # running statements end, and their answers are lost
            proxy.reset()
            proxy.restore()
            proxy.resume()
            say(f"database back -> next purge: {_wait_for_progress(site):.2f} s")
        verdict = site.settle()
    say(str(verdict))
    verdict.assert_in_order()
    site.assert_one_leader()
    assert site.fleet.count("LeaderRefreshed") > 0, "no statement was cut off"
