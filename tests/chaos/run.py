"""A chaos run: outboxes under load, harvesters that suffer faults, a reader that judges, a report."""

import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Self

from devstack.processes import wait_until
from tests.chaos.hostile import HostileWriter
from tests.chaos.ill import CREW, make_ill, settle_roles
from tests.chaos.load import LoadProcess, LoadSettings
from tests.chaos.outbox import ChaosOutbox, Hit, Missed, cut_off
from tests.chaos.reader import Reader
from tests.chaos.report import Happened, Report, within_freeze
from tests.chaos.schedule import LONGEST_ILLNESS_SECONDS, Fault, Schedule
from tests.chaos.services import SIDES, Services
from tests.chaos.waiting import Wait, Waiting

PARTITIONS = 3
_RECOVERY_SECONDS = 30.0
_BEGIN_SECONDS = 150.0  # eight processes start, on a busy machine
_DRAIN_SECONDS = 120.0
_PROGRESS_SECONDS = 10.0
_SYNC_SECONDS = 90.0
_CATCH_UP_SECONDS = 150.0
_ATTEMPTS = 3

Say = Callable[[str], None]


class ChaosRun:
    """One run. A context manager; `run` may be called once.

    Args:
        services: its services, which no other run uses meanwhile.
        name: prefix of its outboxes' names; letters and digits.
        delivery: the harvesters' mode at the beginning.
        seed: of the schedule.
        outboxes: number of outboxes, in parallel.
        records_per_second: wanted of the load, of all outboxes together.
        keys: number of keys on each topic; at least once, one record of each is under way at a time.
        directory: for journals, logs and the report; a temporary one by default.
        leading: "elected"; "always" for harvesters that all believe to lead; "mixed" for one such outbox among others.
        limits: limits of the harvesters that differ from the suite's.
        deck: of faults (`tests.chaos.schedule`); for `one` the services have `sides_of` their own for each outbox.
        breach: a rule that the harvesters break (`tests.chaos.worker.BREACHES`), '' for none.
        hostile: whether a role with INSERT alone writes hostile rows all the time.
        longest_illness: seconds, in the deck `one`.
        say: called with a line of progress.
    """

    def __init__(
        self,
        services: Services,
        *,
        name: str = "chaos",
        delivery: str,
        seed: int,
        outboxes: int,
        records_per_second: float,
        keys: int = 25,
        directory: Path | None = None,
        leading: str = "elected",
        limits: dict[str, Any] | None = None,
        deck: str = "faults",
        breach: str = "",
        hostile: bool = False,
        longest_illness: float = LONGEST_ILLNESS_SECONDS,
        say: Say = lambda _: None,
    ) -> None:
        self.services = services
        self._name = name
        self._delivery = delivery
        self._seed = seed
        self._directory = directory or Path(tempfile.mkdtemp(prefix="chaos-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        self.schedule = Schedule(seed, delivery, outboxes, deck, len(services.brokers[0].of), longest_illness)
        self._one_is_ill = deck == "one"
        self._breach = breach
        self._is_hostile = hostile
        self._hostile: list[HostileWriter] = []
        self._rate = records_per_second / outboxes
        self._keys = keys
        self._number = outboxes
        self._always_lead = [leading == "always" or (leading == "mixed" and not number) for number in range(outboxes)]
        self._limits = limits
        self._say = say
        self._open = ExitStack()
        self._stopping = threading.Event()
        self._happened: list[Happened] = []
        self._missed: list[str] = []
        self._errors: list[BaseException] = []
        self._began_at = 0.0
        self._forgotten_before = 0
        self._reported = 0
        self._long_waits: list[str] = []
        self._ill: dict[str, str] = {}
        self._waiting: Waiting | None = None

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            self.outboxes = [self._make_outbox(number, opening) for number in range(self._number)]
            topics = {topic: outbox.name for outbox in self.outboxes for topic in outbox.topics}
            self.services.make_topics(list(topics), PARTITIONS)
            compacted = [outbox.compacted_topic for outbox in self.outboxes]
            self.services.make_topics(compacted, 1, {"cleanup.policy": "compact"})
            settings = [
                LoadSettings(
                    dsn=self.services.postgres.dsn,
                    table=outbox.name,
                    topics=outbox.topics,
                    keys=self._keys,
                    records_per_second=self._rate,
                )
                for outbox in self.outboxes
            ]
            self.load = opening.enter_context(LoadProcess(settings))
            if self._is_hostile:
                dsn = self.services.postgres.dsn
                self._hostile = [
                    opening.enter_context(HostileWriter(dsn, one.name, one.topics, constrained=bool(number % 2)))
                    for number, one in enumerate(self.outboxes)
                ]
            on_row: dict[str, Any] = {}
            if self._one_is_ill:
                names = [outbox.name for outbox in self.outboxes]
                self._waiting = Waiting(self.services.postgres.dsn, names, self._note_long_wait)
                opening.callback(self._waiting.stop)
                on_row = {"on_row": self._waiting.see}
            self.reader = Reader(self.services.kafka.bootstrap, topics, PARTITIONS, **on_row)
            opening.callback(self.reader.stop)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _make_outbox(self, number: int, opening: ExitStack) -> ChaosOutbox:
        outbox = ChaosOutbox(
            self.services,
            self._directory,
            f"{self._name}{number}",
            self.services.links(sides_of(number) if self._one_is_ill else range(SIDES)),
            delivery=self._delivery,
            always_leads=self._always_lead[number],
            as_shipped=self._one_is_ill,
            limits=self._limits,
            breach=self._breach,
        )
        opening.callback(outbox.discard)
        return outbox

    # -- the run

    def run(
        self,
        seconds: float,
        *,
        least_faults: int = 0,
        late_requests: int = 0,
        least_records: int = 0,
        one_of_each: bool = False,
        faults: bool = True,
    ) -> Report:
        """Load and faults for a while, then quiet, and the verdict.

        Args:
            seconds: duration of the faults and of the load.
            least_faults: go on until so many have been done.
            late_requests: go on until so many have been delivered.
            least_records: go on until so many have been read.
            one_of_each: end the faults once every kind has come; load and faults end when that is so, too.
            faults: False for none.
        """
        with self.under_load():
            actors = self._actors(one_of_each=one_of_each) if faults else []
            for actor in actors:
                actor.start()
            until = time.monotonic() + seconds
            while self._goes_on(until, actors if one_of_each else []) or (
                not one_of_each and not self._errors and self._falls_short(least_faults, late_requests, least_records)
            ):
                time.sleep(0.2)
            self._stopping.set()
            for actor in actors:
                actor.join()
            seconds = time.monotonic() - self._began
        return self.settle(seconds)

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Run load and harvesters within the context, which begins when every outbox has begun to deliver."""
        for outbox in self.outboxes:
            outbox.start()
        self._forgotten_before = self.services.forgotten_ends()
        self.reader.start()
        self.load.start()
        for outbox in self.outboxes:
            if self.reader.wait_for_delivery(outbox.name, 0.0, _BEGIN_SECONDS) is None:
                raise AssertionError(f"{outbox.name} does not begin to deliver")
        if self._waiting is not None:
            self._watch(self._waiting)
        self.reader.measuring.set()
        self._began, self._began_at = time.monotonic(), time.time()
        telling = threading.Thread(target=self._tell_progress, daemon=True)
        telling.start()
        try:
            yield
        finally:
            self._stopping.set()
            self.reader.measuring.clear()
            telling.join()

    def _watch(self, waiting: Waiting) -> None:
        """Begin to observe, once all harvesters have joined and each broker has its part."""
        for number, outbox in enumerate(self.outboxes):
            if self.services.has_cluster:
                settle_roles(self.services, outbox, number)
        waiting.start()
        for outbox in self.outboxes:
            if not waiting.catch_up(outbox.name, _BEGIN_SECONDS):
                raise AssertionError(f"{outbox.name} does not catch up with its load")

    def suffer(self, outbox: ChaosOutbox, fault: Fault) -> Happened:
        """Do one fault, within `under_load`, and return it.

        Raises:
            AssertionError: if it could not be done.
        """
        if not self._do(outbox, fault):
            raise AssertionError(self._missed[-1])
        return self._happened[-1]

    def settle(self, seconds: float) -> Report:
        """End the load, let the outboxes run empty, stop the harvesters, read to the end and return the report."""
        if self._errors:
            raise self._errors[0]
        if self._waiting is not None:
            self._waiting.stop()
        self.load.stop()
        for writer in self._hostile:
            writer.stop()
        left, drained = self._drain()
        for outbox in self.outboxes:
            outbox.stop()
        unread = self.reader.finish(60)
        committed = {lane: numbers for outbox in self.outboxes for lane, numbers in outbox.committed().items()}
        checker = self.reader.checker
        checker.finish(committed)
        report = self._report(seconds, sum(map(len, committed.values())), left, unread)
        report.drained = drained
        return report

    def _goes_on(self, until: float, to_finish: list[threading.Thread]) -> bool:
        if self._errors:
            return False
        if to_finish and not any(actor.is_alive() for actor in to_finish):
            return False
        return time.monotonic() < until

    def _falls_short(self, least_faults: int, late_requests: int, least_records: int) -> bool:
        return (
            len(self._happened) < least_faults
            or sum(fault.late is not None for fault in self._happened) < late_requests
            or self.reader.checker.received < least_records
        )

    def _actors(self, *, one_of_each: bool) -> list[threading.Thread]:
        """Return the threads that do the faults: one for each outbox, one for the services."""
        cards = [self.schedule.of_services(), *map(self.schedule.of_outbox, range(self._number))]
        if one_of_each:
            sizes = self.schedule.sizes()
            cards = [islice(faults, size) for faults, size in zip(cards, sizes, strict=True)]
        actors = [threading.Thread(target=self._act, args=(None, cards[0]), daemon=True)]
        for outbox, faults in zip(self.outboxes, cards[1:], strict=True):
            actors.append(threading.Thread(target=self._act, args=(outbox, faults), daemon=True))
        return actors

    def _act(self, outbox: ChaosOutbox | None, faults: Iterator[Fault]) -> None:
        try:
            for fault in faults:
                for _ in range(_ATTEMPTS):
                    if self._stopping.wait(fault.gap):
                        return
                    if self._do(outbox, fault):
                        break
        except BaseException as error:  # handed to the thread that runs the run
            self._errors.append(error)

    def _do(self, outbox: ChaosOutbox | None, fault: Fault) -> bool:
        """Do a fault, and wait until records come in again; return False if it could not be done."""
        try:
            if outbox is None:
                hit = self._disturb_services(fault)
            elif self._one_is_ill:
                self._ill[outbox.name] = f"{fault.kind} from {time.strftime('%H:%M:%S')} for {fault.seconds:.0f} s"
                hit = make_ill(self.services, outbox, fault)
                self._ill[outbox.name] += f", {hit.what}"
            else:
                hit = outbox.suffer(fault)
        except Missed as missed:
            self._missed.append(f"{outbox.name if outbox else 'services'} {fault.kind}: {missed}")
            return False
        finally:
            if outbox is not None:
                outbox.ensure()
        self._happened.append(
            Happened(
                at=round(hit.at - self._began_at, 2),
                began_at=hit.at,
                ended_at=time.time(),
                where=outbox.name if outbox is not None else "services",
                kind=fault.kind,
                what=hit.what,
                # An illness is over by now, and its effect is told by the rows that waited.
                recovered=None if self._one_is_ill else self._wait_for_recovery(outbox, hit.at),
                late=hit.late,
                waited=self._longest_wait(outbox, hit.at),
            )
        )
        return True

    def _longest_wait(self, outbox: ChaosOutbox | None, since: float) -> float | None:
        """Return the longest wait from a fault's beginning until nothing waits; None if nobody looks."""
        if self._waiting is None or outbox is None:
            return None
        caught_up = self._waiting.catch_up(outbox.name, _CATCH_UP_SECONDS)
        longest = self._waiting.longest(outbox.name, since).seconds
        rest = "" if caught_up else f", and {_CATCH_UP_SECONDS:.0f} s after it rows wait"
        self._say(f"        {outbox.name} {self._ill[outbox.name]}: a row waited for {longest:.0f} s{rest}")
        return round(longest, 1)

    def _note_long_wait(self, name: str, wait: Wait) -> None:
        """Note that a row waits for too long, and let the harvesters print what they are doing."""
        if not self._began_at:  # they have not caught up with the beginning of the load yet
            return
        outbox = next(one for one in self.outboxes if one.name == name)
        when = f"{time.strftime('%H:%M:%S', time.localtime(wait.at))} ({wait.at - self._began_at:.0f} s)"
        last, load = self._ill.get(name, "none yet"), os.getloadavg()[0] / (os.cpu_count() or 1)
        text = (
            f"{when}: row {wait.row} of {name} has waited {wait.seconds:.0f} s; last fault: {last}; "
            f"load of the machine {load:.0f} for each processor"  # beyond some, nobody has his time
        )
        self._long_waits.append(text)
        self._say(f"        {text}")
        for process in outbox.members:
            if process is not None and process.is_running:
                process.print_stacks()

    def _wait_for_recovery(self, outbox: ChaosOutbox | None, since: float) -> float | None:
        outboxes = [outbox] if outbox is not None else self.outboxes
        times = []
        for one in outboxes:
            times.append(self.reader.wait_for_delivery(one.name, since, _RECOVERY_SECONDS))
            if times[-1] is None:
                self._say(f"{one.name}: no delivery for {_RECOVERY_SECONDS:.0f} s after a fault")
                return None
        return max(seconds for seconds in times if seconds is not None)

    def _disturb_services(self, fault: Fault) -> Hit:
        kind, _, how = fault.kind.partition(":")
        services, at = self.services, time.time()
        if kind in {"broker-kill", "broker-isolated", "min-isr"}:
            return self._disturb_brokers(kind, fault)
        if kind == "postgres-restart":
            services.postgres.kill_immediate()
            time.sleep(2 * fault.share)
            services.postgres.start()
            return Hit(f"away for {time.time() - at:.1f} s", at)
        side, seconds = fault.count % SIDES, 0.2 + 5 * fault.share
        cut_off(services.brokers[side], how, seconds)
        return Hit(f"side {side} for {seconds:.1f} s", at)

    def _disturb_brokers(self, kind: str, fault: Fault) -> Hit:
        at = time.time()
        if not self.services.has_cluster:
            self.services.kafka.kill()
            time.sleep(2 * fault.share)
            self.services.kafka.start()
            return Hit(f"away for {time.time() - at:.1f} s", at)
        cluster, number = self.services.cluster, fault.count % 3 + 1
        if kind == "broker-isolated":
            cluster.isolate(number)
            time.sleep(2 + 4 * fault.share)
            cluster.rejoin(number)
        else:
            ended = [number] if kind == "broker-kill" else [one for one in cluster.brokers if one != number]
            for one in ended:
                cluster.brokers[one].kill()
            time.sleep(4 * fault.share)
            for one in ended:
                cluster.brokers[one].launch()
        if not cluster.wait_until_in_sync(_SYNC_SECONDS):
            raise AssertionError(f"replicas do not get in sync within {_SYNC_SECONDS:.0f} s after {kind}")
        return Hit(f"{'all but ' if kind == 'min-isr' else ''}broker {number}, {time.time() - at:.1f} s", at)

    # -- the end

    def _drain(self) -> tuple[int, float | None]:
        """Wait until the outboxes are empty; return the number of rows left, and the seconds if there are none."""
        began = time.monotonic()

        def empty() -> bool:
            for outbox in self.outboxes:
                outbox.ensure()
            return not any(outbox.pending() for outbox in self.outboxes)

        if wait_until(empty, timeout=_DRAIN_SECONDS, interval=0.5):
            return 0, round(time.monotonic() - began, 1)
        return sum(outbox.pending() for outbox in self.outboxes), None

    def _report(self, seconds: float, committed: int, left: int, unread: list[str]) -> Report:
        checker = self.reader.checker
        names = {topic: outbox.name for outbox in self.outboxes for topic in outbox.topics}
        excused = []
        if self._delivery == "at-least-once":
            excused = [
                violation
                for violation in checker.violations
                if violation.kind in {"reordered", "repeated (distant)"}
                and within_freeze(violation.sent_at, names[violation.topic], self._happened)
            ]
        pauses = {name: round(pulse.longest_pause, 2) for name, pulse in self.reader.pulses.items()}
        counts = {kind: checker.count(kind) for kind in ("repeated (adjacent)", "repeated (distant)", "reordered")}
        for violation in excused:
            counts[violation.kind] -= 1
        shown = [
            f"{self._when(violation.sent_at)}{' (after a freeze)' if violation in excused else ''} {violation}"
            for violation in checker.violations
            if self._delivery == "exactly-once" or violation.kind != "repeated (adjacent)"
        ]
        return Report(
            delivery=self._delivery,
            seed=self._seed,
            seconds=seconds,
            outboxes=self._number,
            committed=committed,
            received=checker.received,
            rolled_back=self.load.rolled_back,
            lost=checker.count("lost"),
            repeated_adjacent=counts["repeated (adjacent)"],
            repeated_distant=counts["repeated (distant)"],
            reordered=counts["reordered"],
            strangers=checker.count("stranger"),
            mislabelled=checker.count("mislabelled"),
            excused=len(excused),
            transactions=sum(sum(outbox.committed_by_side) for outbox in self.outboxes),
            longest_pause=max(pauses.values()),
            pauses=pauses,
            faults=self._happened,
            missed=self._missed,
            failures=[failure for outbox in self.outboxes for failure in outbox.failures],
            violations=shown,
            unread=unread,
            left_in_outbox=left,
            odd=self.reader.odd,
            forgotten_ends=self.services.forgotten_ends() - self._forgotten_before,
            long_waits=self._long_waits,
            hostile=dict(sum((writer.written for writer in self._hostile), Counter())),
            setting={
                "deck": self.schedule.deck,
                "brokers": self.schedule.brokers,
                "breach": self._breach or "none",
                "records a second": round(committed / seconds) if seconds else 0,
            },
        )

    def _when(self, sent_at: float) -> str:
        return f"{sent_at - self._began_at:.2f} s:" if sent_at else ""

    def _tell_progress(self) -> None:
        while not self._stopping.wait(_PROGRESS_SECONDS):
            checker = self.reader.checker
            self._say(
                f"{time.monotonic() - self._began:5.0f} s  {len(self._happened):4d} faults ({len(self._missed)} "
                f"missed)  {checker.received:8d} records  {self._count_violations():3d} violations"
            )

    def _count_violations(self) -> int:
        """Count the violations that the mode excludes, and report new ones."""
        violations = [
            violation
            for violation in list(self.reader.checker.violations)
            if self._delivery == "exactly-once" or violation.kind != "repeated (adjacent)"
        ]
        for violation in violations[self._reported : self._reported + 5]:
            self._say(f"        {self._when(violation.sent_at)} {violation}")
        self._reported = len(violations)
        return len(violations)


def sides_of(number: int) -> range:
    """Return the sides of an outbox in the deck `one`, which it shares with no other."""
    return range(CREW * number, CREW * (number + 1))


def new_seed() -> int:
    """Return a seed to print."""
    return random.SystemRandom().randrange(10**6)
