"""Deliveries that fail, or are said to have failed, while harvesters come and go (goharvest's own integration test)."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.real_broker]

_LOAD_SECONDS = 3.0


@pytest.mark.complete
def test_failing_deliveries(make_site, database, kafka_bootstrap, say):
    """With 2% failing produce calls and delivery reports, 1, 4 and 8 harvesters lose and reverse no record.

    Of the four the leader is killed; of the eight one leader is asked to stop and the next one is killed.
    """
    sizes = (1, 4, 8)
    sites = [
        make_site(
            f"fail{size}",
            database,
            kafka_bootstrap,
            load={"records_per_second": 150},
            refused=0.02,
            misreported=0.02,
            limits={"io_error_backoff": "100ms"},
        )
        for size in sizes
    ]

    def run(size, site):
        site.start(harvesters=size)
        leader = site.fleet.leader()
        time.sleep(_LOAD_SECONDS)
        if size > 1:
            site.load.burst(200)
            leader.terminate() if size == 8 else leader.kill()
            leader = site.fleet.leader(besides=leader)
        if size == 8:
            site.load.burst(200)
            leader.kill()
            site.fleet.leader(besides=leader)
        return site.settle()

    with ThreadPoolExecutor(len(sites)) as pool:
        verdicts = list(pool.map(run, sizes, sites))
    for size, site, verdict in zip(sizes, sites, verdicts, strict=True):
        say(f"{size} harvesters: {verdict}")
        verdict.assert_in_order()
        site.assert_one_leader()
        assert verdict.repeats > 0, "no report was false: what arrived and was said to have failed arrives again"
