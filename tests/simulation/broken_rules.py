"""Rules of the product, each broken on purpose: a simulation that does not notice proves nothing.

A rule is broken by doubles in the place of the code that keeps it. Some rules are a second line of defence: then the
first one is broken, too, and the second one's rule says which other problem it prevents.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

from outbox_core.election import config as election_config
from outbox_core.election import protocol
from outbox_core.election.config import NeliConfig
from outbox_core.election.member import Member
from outbox_core.election.protocol import Ownership
from outbox_core.harvest.at_least_once import loop
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.harvest.exactly_once import term
from outbox_core.harvest.exactly_once.term import Term
from outbox_core.harvest.exactly_once.terms import ExactlyOnce
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.harvest.harvester import Harvester
from outbox_core.harvest.questions import HarvesterQuestions
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.harvest.watermark import LowWatermark, ScanPlan
from outbox_core.kafka.duty import Duty
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.transactions import TransactionalProducer
from outbox_core.stores.interface import HoldSet
from tests.simulation import broken_at_least_once as at_least_once
from tests.simulation import broken_common as common
from tests.simulation import broken_duty as duty
from tests.simulation import broken_exactly_once as exactly_once
from tests.simulation import transactions_of_592f1f3 as old
from tests.simulation.postgres import Store
from tests.simulation.simulation import Plan, Simulation

_OF_A_DOUBLE = ("AttributeError", "TypeError", "NameError")
_NO_PLAN: Mapping[str, Any] = MappingProxyType({})


class Double(NamedTuple):
    """A double in the place of an attribute of an object of the product."""

    place: object
    name: str
    double: Any


class Rule(NamedTuple):
    """A rule that can be broken: the delivery in which it counts ('' for both), the doubles that break it."""

    mode: str
    doubles: tuple[Double, ...]
    shows: str = ""  # a part of the problem that must be found; another one does not count
    plan: Mapping[str, Any] = _NO_PLAN  # what differs from the plans of other runs: the situation in which it counts


_STAYS_IN_EPOCH = Double(TransactionalProducer, "_end", exactly_once.end_untimed)
_LEADS_ON = Double(ExactlyOnce, "leads", lambda _: True)
_AT_STEPS = {"faults": ("at a step", "hold"), "step_share": 0.1, "late": 0.9, "harvesters": 2}
_LATE_END = {
    "faults": ("move",), "late_ends": 0.3, "poison": 0.02, "late": 0.9, "longest_late": 2.0,
    "latency": 0.03, "pause": 0.3, "writers": 3, "seconds": 40.0, "database_distance": 1.0,
}  # fmt: skip
# A refused record aborts a transaction while another one's Produce is held. That comes within the next transaction.
_LATE_PRODUCE = {
    "faults": ("break",), "late_produces": 0.2, "late": 1.0, "longest_late": 0.2, "latency": 0.02, "pause": 0.2,
    "writers": 5, "poison": 0.03, "seconds": 40.0, "harvesters": 1, "late_ends": 0.0, "database_distance": 1.0,
}  # fmt: skip
# One that was suspended and does not know that another one has led replaces its producer, which fences the other one.
_FENCED_UNNOTICED = {
    "faults": ("suspend",), "late_ends": 0.5, "harvesters": 2, "latency": 0.005, "pause": 0.1, "seconds": 80.0,
    "late": 0.4, "late_changes": 0.0, "poison": 0.0, "database_distance": 1.0,
}  # fmt: skip
# Each term begins with an abort, of its barrier. A copy of that must come when all records are acknowledged, and no
# manifest is on its way: that is for long only if the batch before takes long to be purged.
_LATE_ABORT = {
    "faults": ("reassign",), "late_ends": 0.5, "late": 1.0, "longest_late": 2.0, "latency": 0.005,
    "late_changes": 0.4, "database_distance": 12.0, "pause": 0.3, "writers": 3, "poison": 0.0, "harvesters": 2,
}  # fmt: skip
# A mark comes late, when the rows that it takes are in our hands again.
_LATE_MARKS = {
    "faults": ("hold",), "late_changes": 0.1, "late": 1.0, "longest_late": 3.0, "latency": 0.03, "pause": 1.0,
    "writers": 3, "seconds": 40.0, "poison": 0.0, "database_distance": 1.0,
}  # fmt: skip
# It comes late, while another one is between what it selects and what it updates.
_LATE_SLOW_MARKS = {
    **_LATE_MARKS, "longest_late": 1.0, "slow_statements": 0.7, "slowest_statement": 0.5, "writers": 1, "pause": 0.4,
    "harvesters": 1,
}  # fmt: skip
# It comes late, before a mark whose answer takes longer than the publishing of two records of a key.
_LATE_ANSWERS = {
    "faults": ("break",), "late_changes": 0.1, "late": 1.0, "longest_late": 0.6, "latency": 0.004, "pause": 0.3,
    "writers": 4, "seconds": 60.0, "poison": 0.0, "database_distance": 1.0, "harvesters": 1, "slow_statements": 0.0,
    "slow_answers": 0.2, "slowest_statement": 0.6,
}  # fmt: skip
_NEAR = {"latency": 0.001, "database_distance": 1.0}
# The group removes its owner, which leads again at once, while records of before are on their way.
_OFTEN_REMOVED = {
    "faults": ("expel",), "harvesters": 1, "writers": 5, "pause": 0.1, "late": 1.0, "longest_late": 1.0,
    "latency": 0.005, "database_distance": 1.0,
}  # fmt: skip
_LOST_PURGES = {
    "faults": ("at a step", "crash"), "step_share": 0.05, "late_changes": 0.3, "late": 0.0, "pause": 0.3, **_NEAR,
}  # fmt: skip
_TRUNCATED = {
    "faults": ("truncate",), "fault_pause": 0.2, "late_changes": 0.3, "late": 0.5, "pause": 0.03, "harvesters": 1,
    "writers": 2, **_NEAR,
}  # fmt: skip
# A purge comes late, when the table is empty and its ids are those of other rows, which wait behind a hold.
_LATE_PURGES = {
    "faults": ("truncate", "truncate", "hold"), "fault_pause": 0.4, "late_changes": 0.2, "late": 1.0, "pause": 0.05,
    "harvesters": 1, "writers": 1, "poison": 0.0, "seconds": 40.0, **_NEAR,
}  # fmt: skip
# The purge of the transaction before is under way when a refused record aborts one.
_ABORTED_BEFORE_A_PURGE = {
    "faults": ("break",), "late_changes": 0.3, "late": 0.0, "poison": 0.03, "pause": 0.1, "writers": 5,
    "harvesters": 1, "late_ends": 0.0, **_NEAR,
}  # fmt: skip
# A delivery changes when rows that are published wait for their purge.
_CHANGED = {
    "faults": ("break",), "changes_to": "at-least-once", "late_changes": 0.3, "late": 0.0, "pause": 0.1, "writers": 5,
    "seconds": 20.0, "poison": 0.0, "latency": 0.001, "database_distance": 10.0,
}  # fmt: skip
# One of two harvesters is ill alone, the leader as a rule.
_ONE_IS_ILL = {
    "faults": ("break",), "fault_pause": 1e6, "harvesters": 2, "writers": 3, "pause": 1.0, "seconds": 150.0,
    "illness_pause": 60.0, "poison": 0.0, "late": 0.0, "latency": 0.001,
}  # fmt: skip
_CANNOT_LEAD = {**_ONE_IS_ILL, "illnesses": ("leader topic",)}
_CANNOT_READ = {**_ONE_IS_ILL, "illnesses": ("database", "hang")}
# Both are ill, and one of them gets well.
_ALL_ARE_ILL = {**_CANNOT_READ, "harvesters": 3, "illness_pause": 15.0, "seconds": 300.0}
_HIDDEN = {"faults": ("hide",), "poison": 0.0, **_NEAR}
_FAITHFUL = {"late": 0.0, "late_ends": 0.0, "late_changes": 0.0, "poison": 0.0, **_NEAR}
# The database is down for minutes.
_OUT_FOR_ALL = {
    "faults": ("database",), "outage": 100.0, "fault_pause": 300.0, "harvesters": 3, "writers": 1, "pause": 3.0,
    "seconds": 600.0, **_FAITHFUL,
}  # fmt: skip
# Somebody's lock is in the way of all changes for up to a minute.
_LOCKED = {
    "faults": ("lock",), "fault_pause": 60.0, "harvesters": 2, "writers": 1, "pause": 3.0, "seconds": 400.0,
    **_FAITHFUL,
}  # fmt: skip
_EXPIRED = {"faults": ("expire",), "pause": 3.0, **_FAITHFUL}
_PUT_BACK = {
    "faults": ("put back",), "fault_pause": 20.0, "harvesters": 1, "writers": 1, "pause": 1.0, "seconds": 400.0,
    **_FAITHFUL,
}  # fmt: skip


def _exactly(name: str | object, attribute: str, double: Any, *more: Double, **options: Any) -> Rule:
    return Rule("exactly-once", (Double(name, attribute, double), *more), **options)


def _at_least(name: str | object, attribute: str, double: Any, *more: Double, **options: Any) -> Rule:
    return Rule("at-least-once", (Double(name, attribute, double), *more), **options)


def _both(name: str | object, attribute: str, double: Any, *more: Double, **options: Any) -> Rule:
    return Rule("", (Double(name, attribute, double), *more), **options)


RULES = {
    # exactly once, in the order of docs/explanation-exactly-once.md
    "the manifest waits for all acknowledgements": _exactly(
        Term, "_commit", exactly_once.write_the_manifest_at_once, _STAYS_IN_EPOCH, shows="lost", plan=_LATE_END
    ),
    "records and manifest are in one transaction": _exactly(
        Term,
        "_commit",
        exactly_once.commit_the_manifest_apart,
        Double(Term, "_send_opening", exactly_once.write_no_opening),
        shows="repeated",
        plan=_AT_STEPS,
    ),
    "a fence or a barrier settles the last transaction": _exactly(
        TransactionalProducer,
        "_make",
        exactly_once.use_an_id_of_its_own,
        Double(TransactionalIdentity, "ledger", exactly_once.read_to_the_stable_end),
        plan=_AT_STEPS,
    ),
    "the manifest is read after the fence": _exactly(
        Recovery, "_settle", exactly_once.read_before_the_fence, plan=_AT_STEPS
    ),
    "the end of the tracking topic is written, not asked for": _exactly(
        TransactionalIdentity,
        "ledger",
        exactly_once.read_to_the_stable_end,
        shows="repeated",
        plan={**_AT_STEPS, "neighbour": True},
    ),
    "a term reads the last manifest": _exactly(TransactionalIdentity, "ledger", exactly_once.read_no_ledger),
    "what a predecessor published is deleted": _exactly(Recovery, "_delete", lambda *_: True),
    "a batch is purged before the next commit": _exactly(
        Term,
        "_commit",
        exactly_once.commit_before_the_purge,
        Double(Term, "_publication_is_committed", exactly_once.purge_with_the_last),
        plan=_LOST_PURGES,
    ),
    "scans leave out what is in flight": _exactly(term, "RowQuery", exactly_once.exclude_nothing),
    "scans leave out rows, not all up to the last one": _exactly(
        Store, "_select", exactly_once.select_behind_the_last, shows="rows still wait"
    ),
    "scans leave out what awaits its purge": _exactly(Term, "_start_scan", exactly_once.scan_what_awaits_its_purge),
    "what is in flight is copied before the scan": _exactly(
        Term,
        "_start_scan",
        exactly_once.scan_excluding_nothing,
        Double(Term, "_collect_scan", exactly_once.collect_and_exclude),
    ),
    "scans leave out rows, not ids": _exactly(Store, "_select", exactly_once.exclude_by_id, plan=_TRUNCATED),
    "an abort throws away what was scanned": _exactly(Term, "_discard", exactly_once.keep_the_scan),
    "what awaits its purge is left out after an abort": _exactly(
        Term,
        "_forget_scanned",
        exactly_once.forget_what_awaits_its_purge,
        plan=_ABORTED_BEFORE_A_PURGE,
    ),
    "a scan is a statement of its own, on the primary": _exactly(
        Store, "_select", exactly_once.select_on_a_replica, shows="repeated"
    ),
    "a purge is on disk when it is reported": _exactly(
        Store,
        "_delete",
        exactly_once.delete_in_memory,
        Double(Simulation, "_fault_database", exactly_once.restart_without_the_unwritten),
        shows="repeated",
        plan={"faults": ("database",)},
    ),
    "a change of delivery settles the last transaction": _exactly(
        Recovery, "settle_if_tracked", lambda _: None, shows="of its key", plan=_CHANGED
    ),
    "a delete matches the create time": _both(Store, "_delete", exactly_once.delete_by_id),
    "a manifest names its outbox": _exactly(
        TransactionalIdentity,
        "_checked",
        lambda _, ledger: ledger,
        Double(Store, "_delete", exactly_once.delete_by_id),
        plan={"foreign": True},
    ),
    "an unknown outcome is no success": _exactly(TransactionalProducer, "commit", exactly_once.believe_the_commit),
    "an unknown outcome is no failure": _exactly(
        TransactionalProducer,
        "commit",
        exactly_once.doubt_the_commit,
        Double(TransactionalIdentity, "begin", exactly_once.begin_unchecked),
        _LEADS_ON,
    ),
    "a fence ends the term, not the leadership": _exactly(
        ExactlyOnce, "run", exactly_once.end_the_leadership, shows="rows still wait", plan={"faults": ("at a step",)}
    ),
    "no transaction in an epoch with a late EndTxn": _exactly(*_STAYS_IN_EPOCH, shows="repeated", plan=_LATE_END),
    "no transaction in an epoch with a late Produce": _exactly(
        TransactionalProducer, "abort", exactly_once.abort_in_its_epoch, shows="lost", plan=_LATE_PRODUCE
    ),
    "a replaced producer reads the ledger again": _exactly(
        TransactionalIdentity, "begin", exactly_once.begin_unchecked, _LEADS_ON, plan=_FENCED_UNNOTICED
    ),
    "a transaction begins with its opening": _exactly(
        Term, "_send_opening", exactly_once.write_no_opening, _STAYS_IN_EPOCH, shows="lost", plan=_LATE_ABORT
    ),
    "a torn transaction is read back": _exactly(Recovery, "_settle_torn", lambda *_: None, _STAYS_IN_EPOCH),
    "the transactions of 592f1f3": Rule(
        "exactly-once", tuple(Double(*each) for each in old.DOUBLES), shows="lost", plan=_LATE_END
    ),
    "expiry is no outage": _exactly(
        TransactionalProducer, "_torn", exactly_once.take_expiry_for_unknown, shows="there is none", plan=_EXPIRED
    ),
    # at least once
    "one record of a key is under way": _at_least(loop, "Lanes", at_least_once.NoLanes),
    "lanes move on with the purge": _at_least(
        loop,
        "Lanes",
        at_least_once.EarlyLanes,
        Double(loop.AtLeastOnce, "_succeed", at_least_once.succeed_and_move_on),
    ),
    "selected is compared with updated": _at_least(Store, "mark", at_least_once.mark_believed, plan=_LATE_SLOW_MARKS),
    "a mark of a row in our lanes is a rival's": _at_least(Lanes, "knows_any", lambda *_: False, plan=_LATE_MARKS),
    "a mark of a row that we purged meanwhile is a rival's": _at_least(
        Lanes, "knows_any", at_least_once.knows_what_is_held, shows="comes after", plan=_LATE_ANSWERS
    ),
    "a short purge forces a remark": _at_least(Store, "purge", at_least_once.purge_believed, plan=_LATE_MARKS),
    "a purge matches the leader ID": _at_least(
        Store,
        "purge",
        at_least_once.purge_of_anybody,
        Double(Store, "_delete", exactly_once.delete_by_id),
        shows="lost",
        plan=_LATE_PURGES,
    ),
    "a mark takes a dead leader's rows": _at_least(Store, "_select", at_least_once.mark_unmarked_alone),
    "a failed delivery clears its marks": _at_least(Store, "reset", lambda *_: 0),
    "a mark in doubt forces a remark": _at_least(StoreCall, "result", at_least_once.never_in_doubt),
    "rows with our mark are looked for": _at_least(
        Store, "find_lost", at_least_once.find_nothing_lost, shows="rows still wait", plan=_PUT_BACK
    ),
    "a send fits into the lease": _at_least(
        loop.AtLeastOnce,
        "_closes_at",
        lambda *_, **__: float("inf"),
        Double(Publisher, "cancel", lambda _: None),
        plan={"faults": ("isolate",), "harvesters": 2, "pause": 0.1, **_NEAR},
    ),
    "a leadership ends with nothing in flight": _at_least(
        loop.AtLeastOnce,
        "_finish",
        at_least_once.finish_at_once,
        plan={"faults": ("restart",), "harvesters": 2, "late": 0.9, "pause": 0.1, **_NEAR},
    ),
    # both deliveries
    "S is read before the writers": _both(Store, "snapshot", common.writers_read_first),
    "the floor waits for open writers": _both(LowWatermark, "_take_in", common.settled_at_once),
    "a scan for the floor begins after the evidence": _both(
        ScanPlan,
        "gather",
        common.gather_later,
        Double(Store, "mark", common.mark_then_gather),
        Double(Store, "scan", common.scan_then_gather),
    ),
    "the floor falls when an exclusion ends": _both(LowWatermark, "_readmit", common.readmit_nothing),
    "the floor is void when all rows leave our hands": _both(LowWatermark, "reset", common.keep_the_floor),
    "the floor falls when some rows leave our hands": _both(LowWatermark, "went_back", common.note_nothing),
    "the floor counts in one place": _both(
        Store, "_select", common.believe_the_place, Double(LowWatermark, "_take_in", common.believe_all_evidence)
    ),
    "what is held is not published": _both(HoldSet, "covers", common.covers_nothing, shows="is held"),
    "holds are read again and again": _both(HoldCache, "current_or_reread", common.current_holds, shows="is held"),
    "holds are read earlier than the rows": _both(Store, "_select", common.select_by_present_holds),
    "a lease ends": _both(Ownership, "expire", common.never_expires),
    "a lease counts from the sending": _both(Ownership, "_lead", common.lead_from_now),
    "a higher claim ends a lease": _both(
        Ownership,
        "_observe_claim",
        common.obey_no_claim,
        plan={"faults": ("cut",), "harvesters": 2, "writers": 1, "pause": 1.0, "drift": 1e-4, **_NEAR},
    ),
    "a session is longer than a lease": _both(
        NeliConfig,
        "_shortest_session",
        property(common.short_session),
        Double(election_config, "_SHORTEST_SESSION", timedelta(0)),
        Double(protocol.Predecessor, "gone_at", float("-inf")),
        shows="two lead",
        plan={"faults": ("suspend",), "harvesters": 2},
    ),
    "a hand-over waits for the term": _at_least(
        Harvester,
        "_hand_over",
        common.hand_over_at_once,
        plan={"faults": ("reassign",), "harvesters": 2, "pause": 0.1, "writers": 5, **_NEAR},
    ),
    "no lease begins while an earlier one of its own may run": _at_least(
        protocol.Predecessor,
        "suspect",
        lambda *_: None,
        Double(Publisher, "renew_if_broken", at_least_once.renew_always),
        shows="comes after",
        plan=_OFTEN_REMOVED,
    ),
    # whoever can work, works
    "an owner that cannot lead leaves": _both(
        Member, "_leave_if_unable", duty.stay_as_owner, shows="could work", plan=_CANNOT_LEAD
    ),
    "a leader that cannot work leaves": _both(
        Duty, "overdue", duty.never_overdue, shows="could work", plan=_CANNOT_READ
    ),
    "Kafka is asked who else is in the group": _both(
        HarvesterQuestions, "members", duty.no_word_of_others, shows="could work", plan=_CANNOT_READ
    ),
    "who could not work stays out until a probe succeeds": _both(
        Duty, "may_return", duty.come_back_unproved, shows="could work", plan=_ALL_ARE_ILL
    ),
    "who is able again comes back": _both(
        Duty, "may_return", duty.stay_out_while_silent, shows="could work", plan=_ALL_ARE_ILL
    ),
    "who left in an outage for all stays out": _both(
        Duty, "heard", lambda *_: None, shows="time in one outage for all", plan=_OUT_FOR_ALL
    ),
    "an outage for all passes the partition round slowly": _both(
        Duty, "overdue", duty.no_patience_with_newcomers, shows="after it was in one outage for all", plan=_OUT_FOR_ALL
    ),
    "a statement that the database is at work on passes nothing on": _both(
        Store, "at_work", lambda *_: "", shows="for a lock", plan=_LOCKED
    ),
    "a statement has a deadline of the client's own": _both(
        Store,
        "bounded",
        staticmethod(duty.unbounded),
        Double(Duty, "overdue", duty.never_overdue),
        shows="could work",
        plan={**_ONE_IS_ILL, "illnesses": ("hang",)},
    ),
    "a session refuses to filter rows": _both(Store, "refuses", lambda *_: False, plan=_HIDDEN),
    "no lease begins while an earlier one may run": _both(
        protocol.Predecessor,
        "gone_at",
        float("-inf"),
        shows="two lead",
        plan={"faults": ("reassign",), "harvesters": 2},
    ),
}


def plan_of(seed: int, mode: str, rule: str) -> Plan:
    """Return the plan of a seed, for a broken rule in the situation in which it counts."""
    if not rule:
        return Plan.of(seed, mode)
    found = RULES[rule]
    return replace(Plan.of(seed, mode or found.mode), **found.plan)


def shows(rule: str, problem: str) -> bool:
    """Return True if the problem is the one that the broken rule must lead to, and not that a double is outdated."""
    if rule and any(error in problem for error in _OF_A_DOUBLE):
        return False
    return bool(problem) and (rule not in RULES or RULES[rule].shows in problem)


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Break a rule for as long as the context lasts; '' breaks none."""
    with ExitStack() as patches:
        for place, attribute, double in RULES[name].doubles if name else ():
            patches.enter_context(patch.object(place, attribute, double))
        yield


def rule_named(*names: str) -> Callable[[str], str]:
    """Return what reads the name of a rule from a command line, and says which names are similar if there is none."""

    def read(name: str) -> str:
        if name in ("", *names):
            return name
        near = [each for each in names if name.lower() in each.lower()] or get_close_matches(name, names, 3, 0.4)
        these = ", ".join(map(repr, near)) or "the names are in broken_*rules.py"
        raise ArgumentTypeError(f"there is no rule {name!r}; {'meant may be ' if near else ''}{these}")

    return read
