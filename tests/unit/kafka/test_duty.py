"""The rule by which a member that cannot work leaves its group: its parts, and what comes of it among three members."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from outbox_core.kafka.duty import (
    ASK_SECONDS,
    LAST_PROBE_SECONDS,
    NEW_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    RESUMED_SECONDS,
    SILENCE_JITTER_SECONDS,
    SILENCE_SECONDS,
    Duty,
)

WORK = "read the outbox"


def worked(spread: float = 0.0) -> Duty:
    """Return the duty of a member that got the right to work at 0, and worked."""
    duty = Duty(spread)
    duty.began(0.0)
    duty.tried(WORK, 0.0)
    duty.succeeded(WORK)
    return duty


def test_work_that_is_not_tried_is_never_overdue():
    """A member with nothing to do is in order, however long that lasts."""
    assert not worked().overdue(10_000.0)


def test_work_counts_from_the_first_try_since_it_succeeded():
    """Tries that follow one that failed, or hangs, do not begin the patience anew; a success ends it."""
    duty = worked()
    for now in (100.0, 110.0, 119.0):
        duty.tried(WORK, now)
    assert not duty.overdue(100.0 + PATIENCE_SECONDS - 0.1)
    assert duty.overdue(100.0 + PATIENCE_SECONDS) == {WORK: PATIENCE_SECONDS}
    duty.succeeded(WORK)
    duty.tried(WORK, 121.0)
    assert not duty.overdue(122.0)


def test_one_work_does_not_excuse_another():
    """Work that succeeds leaves what does not outstanding; what is dropped is not owed any more."""
    duty = worked()
    for now in range(100, 120):
        duty.tried("write to orders[2]", now)
        duty.tried(WORK, now)
        duty.succeeded(WORK)
    assert list(duty.overdue(120.0)) == ["write to orders[2]"]
    duty.dropped("write to orders[2]")
    assert not duty.overdue(120.0)


def test_a_newcomer_is_given_longer():
    """Work that has not succeeded since the right began is overdue a minute after that beginning, not before."""
    duty = Duty()
    duty.began(0.0)
    duty.tried(WORK, 1.0)
    assert not duty.overdue(NEW_PATIENCE_SECONDS - 0.1)
    assert duty.overdue(NEW_PATIENCE_SECONDS)


def test_who_had_the_right_for_long_is_no_newcomer():
    """After hours with nothing to do the first work that fails is overdue after the short patience."""
    duty = Duty()
    duty.began(0.0)
    duty.tried(WORK, 7200.0)
    assert duty.overdue(7200.0 + PATIENCE_SECONDS)


def test_nothing_is_owed_without_the_right():
    """Work before the right began, and after it ended, counts for nothing."""
    duty = worked()
    duty.tried(WORK, 1.0)
    duty.ended()
    duty.tried(WORK, 2.0)
    assert not duty.overdue(1000.0)
    duty.began(1000.0)
    assert not duty.overdue(2000.0)


def test_a_right_that_flaps_keeps_what_is_owed():
    """A right that was lost and is back some seconds later is the same one; after longer it is new."""
    duty = Duty()
    duty.began(0.0)
    for now in range(0, 60, 10):
        duty.tried(WORK, now + 1.0)
        duty.lost(now + 2.0)
        assert not duty.overdue(now + 9.0)
        duty.began(now + 10.0)
    assert duty.overdue(60.0) == {WORK: 59.0}
    duty.lost(62.0)
    duty.began(62.1 + RESUMED_SECONDS)
    assert not duty.owed(80.0)


def test_a_right_that_was_handed_over_is_new():
    """Work owed before a hand-over is the successor's, also if the right was lost meanwhile."""
    duty = worked()
    duty.tried(WORK, 1.0)
    duty.ended()
    duty.lost(2.0)
    duty.began(3.0)
    assert not duty.owed(100.0)


def test_asks_who_is_there_every_few_seconds():
    """A member with overdue work asks at once, and then every few seconds, not at every turn."""
    duty = worked()
    duty.tried(WORK, 100.0)
    asked = [now for now in range(100, 140) if duty.should_ask(now)]
    assert asked == list(range(120, 140, int(ASK_SECONDS)))


@pytest.mark.parametrize(("members", "leaves"), [(1, False), (2, True), (7, True), (None, True), (0, True)])
def test_only_the_last_one_stays(members, leaves):
    """A member leaves if another is there, or if Kafka does not say or does not know of this one."""
    duty = worked()
    duty.tried(WORK, 100.0)
    assert duty.should_leave(members, 120.0) == leaves
    assert not duty.should_leave(members, 110.0), "it does not leave before anything is overdue"


def test_stays_in_if_it_works_again_while_the_answer_is_on_its_way():
    """A success between question and answer keeps the member."""
    duty = worked()
    duty.tried(WORK, 100.0)
    assert duty.should_ask(120.0)
    duty.succeeded(WORK)
    assert not duty.should_leave(2, 121.0)


def test_probes_ever_more_rarely():
    """Pauses between probes double up to a limit, and begin anew at the next departure."""
    duty = worked()
    for start in (0.0, 1000.0):
        duty.left(start)
        times = []
        for tenth in range(600):
            if duty.should_probe(now := start + tenth / 10):
                times.append(now - start)
                duty.heard(now)
                duty.probed(now, is_able=False)
        assert times[:4] == [1.0, 3.0, 7.0, 15.0]
        assert times[5] - times[4] == LAST_PROBE_SECONDS
        duty.returned()


def test_comes_back_by_a_probe():
    """A probe that succeeds lets the member come back, although others are at the work; one that fails does not."""
    duty = worked()
    duty.left(100.0)
    duty.heard(105.0)
    duty.probed(105.0, is_able=False)
    assert not duty.may_return(105.0)
    duty.probed(107.0, is_able=True)
    assert duty.may_return(107.0)
    assert not duty.should_probe(1000.0)
    duty.returned()
    assert not duty.is_out
    assert not duty.may_return(1000.0)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_comes_back_where_nobody_is_heard(spread):
    """Where nobody is at the work for the silence and the member's own jitter, it tries again."""
    duty = worked(spread)
    duty.left(100.0)
    duty.heard(130.0)
    silence = SILENCE_SECONDS + spread * SILENCE_JITTER_SECONDS
    assert not duty.may_return(130.0 + silence - 0.1)
    assert duty.may_return(130.0 + silence)


# -- among members: a group that gives the work to one of those that are in it

HAND_OVER_SECONDS = 6.0


@dataclass
class Group:
    """Members A, B, C, one of which has the work; times of hand-overs and of the work that was done."""

    says: bool = True  # Kafka says how many are there
    ill: set[str] = field(default_factory=set)
    now: float = 0.0
    worker: str | None = None
    free_at: float = 0.0
    hand_overs: list[tuple[float, str]] = field(default_factory=list)
    done_at: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.members = {name: Duty(spread) for name, spread in zip("ABC", (0.0, 0.5, 1.0), strict=True)}

    def run(self, seconds: float) -> None:
        """Let time pass in steps of half a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self._give()
            for name, duty in self.members.items():
                self._out(name, duty) if duty.is_out else self._in(name, duty)

    def _give(self) -> None:
        candidates = [name for name, duty in self.members.items() if not duty.is_out]
        if self.worker is None and candidates and self.now >= self.free_at:
            self.worker = candidates[0]
            self.members[self.worker].began(self.now)

    def _in(self, name: str, duty: Duty) -> None:
        if name != self.worker:
            return
        duty.tried(WORK, self.now)
        if name not in self.ill:
            duty.succeeded(WORK)
            self.done_at.append(self.now)
        inside = sum(not each.is_out for each in self.members.values())
        if duty.should_ask(self.now) and duty.should_leave(inside if self.says else None, self.now):
            duty.left(self.now)
            self.worker, self.free_at = None, self.now + HAND_OVER_SECONDS
            self.hand_overs.append((self.now, name))

    def _out(self, name: str, duty: Duty) -> None:
        if self.worker is not None:
            duty.heard(self.now)
        if duty.should_probe(self.now):
            duty.probed(self.now, is_able=name not in self.ill)
        if duty.may_return(self.now):
            duty.returned()

    @property
    def longest_gap(self) -> float:
        """The longest time, in seconds, in which no work was done."""
        times = [0.0, *self.done_at, self.now]
        return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("ill", "hand_overs", "worst"),
    [
        ("", "", 1),
        ("A", "A", 45),
        ("AB", "AB", 45 + 75),
        ("BC", "", 1),
        ("ABC", "AB", 3600),
    ],
)
def test_the_work_comes_to_who_can_do_it(ill, hand_overs, worst):
    """Each ill member that has the work hands over once, and keeps out for as long as it is ill."""
    group = Group()
    group.run(100)
    group.ill = set(ill)
    group.run(3600)
    assert "".join(name for _, name in group.hand_overs) == hand_overs
    assert group.longest_gap <= worst
    times = [at for at, _ in group.hand_overs]
    assert all(later - earlier >= NEW_PATIENCE_SECONDS for earlier, later in pairwise(times))


@pytest.mark.parametrize("mended", ["A", "B", "C"])
def test_the_first_that_is_mended_takes_over(mended):
    """After an outage for all, who is mended first has the work within 30 s, be it in the group or out of it."""
    group = Group(ill=set("ABC"))
    group.run(1000)
    assert [name for _, name in group.hand_overs] == ["A", "B"]
    group.ill.discard(mended)
    mended_at = group.now
    group.run(60)
    assert group.worker == mended
    assert group.done_at[0] - mended_at <= 30


def test_all_that_are_mended_work_at_once():
    """When the outage is over for all, the one that stayed works at its next try, and the others come back."""
    group = Group(ill=set("ABC"))
    group.run(1000)
    group.ill.clear()
    mended_at = group.now
    group.run(60)
    assert group.done_at[0] - mended_at <= 1
    assert not any(duty.is_out for duty in group.members.values())
    assert len(group.hand_overs) == 2


def test_a_group_that_kafka_does_not_describe_goes_round_once_a_minute():
    """Where Kafka does not say who is there all leave in turn, and come back; at most one hand-over a minute."""
    group = Group(says=False, ill=set("ABC"))
    group.run(3600)
    times = [at for at, _ in group.hand_overs]
    assert len(times) > 2
    assert all(later - earlier >= NEW_PATIENCE_SECONDS for earlier, later in pairwise(times))
    group.ill.clear()
    mended_at = group.now
    group.run(60)
    assert next(at for at in group.done_at if at > mended_at) - mended_at <= 30
