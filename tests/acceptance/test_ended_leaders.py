"""Leaders that are killed, paused or asked to stop under load, and their successors."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import pytest

from outbox_core.election import now

pytestmark = [pytest.mark.alone, pytest.mark.real_broker]

_KILLS = int(os.environ.get("OUTBOX_TEST_FAULT_ROUNDS", "3"))
_OUTBOXES = 3
_HAND_OVERS = 2
_PAUSE_SECONDS = 9.0  # the session is 6 s


def _everywhere(do, sites):
    """Call it with all sites at once, and return the results: these scenarios mostly wait."""
    with ThreadPoolExecutor(len(sites)) as pool:
        return list(pool.map(do, sites))


def _spread(seconds):
    return f"min {min(seconds):.2f} s, median {median(seconds):.2f} s, max {max(seconds):.2f} s"


@pytest.mark.timeout(360 + 15 * _KILLS // _OUTBOXES)
def test_killed_leaders(make_site, database, kafka_bootstrap, say):
    """Leaders killed under load lose and reverse no record; no successor leads before a dead leader's lease ends."""
    sites = [make_site(f"kill{number}", database, kafka_bootstrap) for number in range(_OUTBOXES)]
    for site in sites[::2]:
        site.load.slow_down("DELETE", 0.02)
    rounds = [len(range(number, _KILLS, _OUTBOXES)) for number in range(_OUTBOXES)]

    def kill_repeatedly(site):
        site.start(harvesters=2)
        failovers, left_marked = [], 0
        for _ in range(rounds[sites.index(site)]):
            victim = site.fleet.leader()
            site.load.burst(600)
            time.sleep(random.uniform(0, 0.3))
            killed_at = victim.kill()
            left_marked += site.load.marked() > 0
            site.fleet.start()
            site.fleet.leader(besides=victim)
            failovers.append(site.fleet.takeover_seconds(killed_at))
        return failovers, left_marked, site.settle()

    results = _everywhere(kill_repeatedly, sites)
    say(f"{_KILLS} kills, {sum(left for _, left, _ in results)} of them with rows marked")
    say(f"killed -> next delivery: {_spread([seconds for failovers, _, _ in results for seconds in failovers])}")
    for site, (_, _, verdict) in zip(sites, results, strict=True):
        say(str(verdict))
        verdict.assert_in_order()
        site.assert_one_leader()
    assert sum(left for _, left, _ in results) > 0, "no kill came while a record was under way"


@pytest.mark.complete
def test_paused_leaders(make_site, database, kafka_bootstrap, say):
    """A leader stopped for longer than its session is replaced, and fenced when it wakes up; no record is lost.

    Bytes that were already on their way may arrive late and reverse a key; that is documented, and counted here.
    """
    sites = [make_site(f"pause{number}", database, kafka_bootstrap) for number in range(3)]
    for site in sites:
        site.load.slow_down("DELETE", 0.02)

    def pause_once(site):
        site.start(harvesters=2)
        victim = site.fleet.leader()
        site.load.burst(2000)
        time.sleep(random.uniform(0, 0.2))
        paused_at = now()
        victim.pause()
        left_marked = site.load.marked()
        site.fleet.leader(besides=victim)
        takeover = site.fleet.takeover_seconds(paused_at)
        time.sleep(max(0.0, paused_at + _PAUSE_SECONDS - now()))
        resumed_at = now()
        victim.resume()
        time.sleep(2)
        return takeover, left_marked, resumed_at, victim, site.settle()

    results = _everywhere(pause_once, sites)
    say(f"paused -> next delivery: {_spread([takeover for takeover, *_ in results])}")
    assert any(left_marked for _, left_marked, *_ in results), "no pause came while a record was under way"
    for site, (_, _, resumed_at, victim, verdict) in zip(sites, results, strict=True):
        say(f"{verdict}; {site.fleet.count('stray')} sent without a lease")
        verdict.assert_complete()
        site.assert_one_leader(strays=True)
        fenced = [entry["at"] for entry in victim.journal() if entry["event"] == "LeaderFenced"]
        assert site.fleet.count("stray") <= 1, "more was sent than what was between the lease's check and the sending"
        assert fenced, "the paused leader was not fenced"
        assert resumed_at <= fenced[0] <= resumed_at + 10


def test_stopped_leaders(make_site, database, kafka_bootstrap, say):
    """A leader that gets SIGTERM under load leaves no mark; the next goes on at once; no record is lost or repeated."""
    sites = [
        make_site("term", database, kafka_bootstrap),
        make_site("slow", database, kafka_bootstrap, report_delay=0.05),
        make_site("command", database, kafka_bootstrap, command=True),
    ]
    sites[1].load.slow_down("DELETE", 0.02)

    def stop_repeatedly(site):
        site.start(harvesters=3)  # there is always one that waits, while another joins
        hand_overs = []
        for _ in range(_HAND_OVERS):
            victim = site.fleet.leader()
            site.load.burst(300)
            time.sleep(random.uniform(0, 0.2))
            asked_at = victim.terminate()
            left = site.load.marked_by(victim.leader_ids())
            assert left == 0, f"{victim.name} left {left} marks; {victim.output()[-2000:]}"
            site.fleet.leader(besides=victim)
            hand_overs.append(site.fleet.takeover_seconds(asked_at))
            site.fleet.start()
            time.sleep(1.5)  # it joins, and leadership stays where it is
        return hand_overs, site.settle()

    results = _everywhere(stop_repeatedly, sites)
    seconds = [seconds for hand_overs, _ in results[:2] for seconds in hand_overs]  # the command notes no deliveries
    say(f"asked to stop -> next delivery: {_spread(seconds)}")
    for site, (_, verdict) in zip(sites, results, strict=True):
        say(str(verdict))
        verdict.assert_flawless()
        site.assert_one_leader()
