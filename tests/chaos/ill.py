"""One of an outbox's harvesters is ill, and the others are well: the faults of the deck `one`.

    link:<to> <fault>   its links to the database, to all brokers, or to the one broker that leads the leader topic,
                        coordinates the group or the transactions, or has data alone, fail as `devstack.links` says
    backends:those      the server processes of its database connections stand still (SIGSTOP)
    backends:all        those of connections that it opens meanwhile, too
    process:freeze      it stands still
    process:kill        it dies, and is started again at the end
    process:restart     it is asked to stop, and started again at once

Three of four times it is the leader, else one that stands by. A server process stands still only where it waits for its
client and has changed nothing: one that stood still with locks on rows would be a fault of the database for all.
"""

import os
import signal
import time
from contextlib import suppress
from typing import Any, NamedTuple

import psycopg

from devstack.broker import Proxy
from devstack.cluster import GROUP_STATE
from devstack.errors import DevstackError
from devstack.links import LinkFault, faulty
from tests.chaos.outbox import ChaosOutbox, Hit, Missed
from tests.chaos.process import HarvesterProcess
from tests.chaos.schedule import Fault
from tests.chaos.services import Services

CREW = 3
"""Harvesters of each outbox."""
_SHORTEST_DELAY, _LONGEST_DELAY = 0.05, 0.4  # in each direction, of each piece: a commit takes five trips and more
_LOOK_SECONDS = 0.2
_BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
_IDLE_BACKENDS = f"{_BACKENDS} AND wait_event = 'ClientRead' AND state = 'idle' AND backend_xid IS NULL"


class _Patient(NamedTuple):
    side: int
    process: HarvesterProcess
    leads: bool

    def __str__(self) -> str:
        return f"{self.process.name} ({'leader' if self.leads else 'standby'})"


def settle_roles(services: Services, outbox: ChaosOutbox, number: int) -> None:
    """Let different brokers lead an outbox's leader topic and coordinate its group, so that each can be lost alone.

    A third one coordinates its transactions; of every second outbox it is that of the group, so that there is a broker
    with data alone. (Outboxes may share a coordinator's partition: the last one moves it.)
    """
    cluster = services.cluster
    for_leaders, for_group, other = (1 + (number + step) % len(cluster.brokers) for step in range(3))
    names = outbox.config.leader_names(outbox.identity)
    cluster.move_leader(names.topic, 0, for_leaders)
    cluster.move_coordinator(names.group_id, for_group, GROUP_STATE)
    if outbox.delivery == "exactly-once":
        transactions = outbox.config.tracking_names(outbox.identity).transactional_id
        cluster.move_coordinator(transactions, other if number % 2 == 0 else for_group)


def make_ill(services: Services, outbox: ChaosOutbox, fault: Fault) -> Hit:
    """Let one of an outbox's harvesters be ill for the fault's seconds.

    Raises:
        Missed: nobody leads.
    """
    patient, at = _choose(outbox, fault), time.time()
    kind, _, what = fault.kind.partition(":")
    if kind == "link":
        return _lose_link(services, outbox, patient, fault)
    if kind == "backends":
        count = _freeze_backends(services, patient.process.name, fault.seconds, and_new_ones=what == "all")
        return Hit(f"{patient}: {count} for {fault.seconds:.0f} s", at)
    seconds = _suffer_itself(outbox, patient, what, fault)
    return Hit(f"{patient} for {seconds:.0f} s", at)


def _choose(outbox: ChaosOutbox, fault: Fault) -> _Patient:
    leader = outbox.leader()
    sides = range(len(outbox.members))
    at = outbox.members.index(leader)
    side = at if fault.count < 4 else (at + 1 + int(fault.share * 1000) % (len(sides) - 1)) % len(sides)
    process = outbox.members[side]
    if process is None or not process.is_running:
        raise Missed("it has just ended")
    return _Patient(side, process, side == at)


def _lose_link(services: Services, outbox: ChaosOutbox, patient: _Patient, fault: Fault) -> Hit:
    links = outbox.links[patient.side]
    to, how = fault.kind.removeprefix("link:").split()
    what, lost = "the database", list[Proxy]([links.database])
    if to != "database":
        roles = _roles(services, outbox)
        brokers = [number for number, played in roles.items() if to in {"brokers", *played}]
        if to == "data":  # each leads some partition; the one with data alone, or with transactions
            brokers = sorted(brokers, key=lambda number: len(roles[number] - {"transactions"}))[:1]
        what = ", ".join(f"broker {number} [{' '.join(sorted(roles[number]))}]" for number in brokers)
        lost = [links.brokers.of[number] for number in brokers]
    # At least once, bytes of Kafka's clients that arrive after their leader was deposed are excluded by nothing.
    drop = fault.share < 0.5 or (to != "database" and outbox.delivery == "at-least-once")
    delay = _SHORTEST_DELAY + (_LONGEST_DELAY - _SHORTEST_DELAY) * fault.share
    at = time.time()
    with faulty(lost, LinkFault(how), drop=drop and how != LinkFault.SLOW, delay=delay):
        time.sleep(fault.seconds)
    rest = "" if how in {LinkFault.REFUSE, LinkFault.SLOW} else ", bytes lost" if drop else ", bytes held"
    return Hit(f"{patient} from {what} for {fault.seconds:.0f} s{rest}", at)


def _roles(services: Services, outbox: ChaosOutbox) -> dict[int, set[str]]:
    """Return the parts that each broker plays for an outbox."""
    if not services.has_cluster:
        return {number: set() for number in outbox.links[0].brokers.of}
    cluster = services.cluster
    roles: dict[int, set[str]] = {number: {"data"} for number in cluster.brokers}
    names = outbox.config.leader_names(outbox.identity)
    try:
        roles[cluster.leader_of(names.topic, 0)].add("leader-topic")
        roles[cluster.coordinator_of(names.group_id, GROUP_STATE)].add("group")
        if outbox.delivery == "exactly-once":
            identity = outbox.config.tracking_names(outbox.identity).transactional_id
            roles[cluster.coordinator_of(identity)].add("transactions")
    except DevstackError as error:
        raise Missed(str(error)) from None
    return roles


def _suffer_itself(outbox: ChaosOutbox, patient: _Patient, what: str, fault: Fault) -> float:
    """Freeze, kill or restart a process, and return the seconds for which it was away."""
    began = time.monotonic()
    if what == "restart":
        outbox.replace(patient.side, outbox.delivery)
    elif what == "kill":
        patient.process.kill()
        time.sleep(fault.seconds)
        outbox.ensure()
    else:
        patient.process.freeze()
        time.sleep(fault.seconds)
        patient.process.thaw()
    return time.monotonic() - began


def _freeze_backends(services: Services, name: str, seconds: float, *, and_new_ones: bool) -> int:
    """Let the server processes of a harvester stand still for a while, a busy one once it is idle; count them."""
    frozen: set[int] = set()
    until = time.monotonic() + seconds
    try:
        with psycopg.connect(services.postgres.dsn, autocommit=True) as connection:
            meant = _pids(connection, _BACKENDS, name)
            while time.monotonic() < until:
                idle = _pids(connection, _IDLE_BACKENDS, name)
                _freeze(connection, name, (idle if and_new_ones else idle & meant) - frozen, frozen)
                time.sleep(_LOOK_SECONDS)
    finally:
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    if not frozen:
        raise Missed("none of its connections was idle")
    return len(frozen)


def _freeze(connection: psycopg.Connection[Any], name: str, idle: set[int], frozen: set[int]) -> None:
    """Freeze server processes, and let go those that have begun to work just before."""
    for pid in idle:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            if pid in _pids(connection, _IDLE_BACKENDS, name):
                frozen.add(pid)
            else:
                os.kill(pid, signal.SIGCONT)


def _pids(connection: psycopg.Connection[Any], query: str, name: str) -> set[int]:
    return {pid for (pid,) in connection.execute(query, [f"kafka-outbox {name}"])}
