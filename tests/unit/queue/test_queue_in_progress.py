"""The unfinished messages of a tracker, against a model that keeps a plain list of markers."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outbox_queue.redelivery.in_progress import InProgress

IDS = st.tuples(st.integers(0, 1), st.integers(0, 4))
AFTER = st.integers(0, 20)


def started(progress, message_id, offset, *, deadline=10.0, queue=b"q"):
    """Let a message begin."""
    progress.start(message_id, queue=queue, marker_offset=offset, started=0.0, deadline=deadline, start=object())


class Model(RuleBasedStateMachine):
    """A model with markers of a few messages in any order, redeliveries that succeed or fail, and passing time."""

    def __init__(self):
        super().__init__()
        self.real = InProgress()
        self.model = {}  # id -> [offset, deadline, handed out]
        self.offset = 0
        self.now = 0

    @rule(message_id=IDS, after=AFTER)
    def start(self, message_id, after):
        self.offset += 1
        started(self.real, message_id, self.offset, deadline=float(self.now + after))
        self.model[message_id] = [self.offset, self.now + after]

    @rule(message_id=IDS, after=AFTER)
    def keep_alive(self, message_id, after):
        self.offset += 1
        entry = self.real.keep_alive(message_id, float(self.now + after))
        assert (entry is not None) == (message_id in self.model)
        if message_id in self.model:
            self.model[message_id][1] = self.now + after

    @rule(message_id=IDS)
    def end(self, message_id):
        self.offset += 1
        assert self.real.end(message_id) == (message_id in self.model)
        self.model.pop(message_id, None)

    @rule(seconds=st.integers(0, 8))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(succeeds=st.booleans())
    def redeliver(self, succeeds):
        expired = self.real.expired(float(self.now))
        deadlines = [entry.deadline for entry in expired]
        assert deadlines == sorted(deadlines)
        assert {entry.message_id for entry in expired} == {key for key, kept in self.model.items() if self.due(kept)}
        assert not self.real.has_expired(float(self.now))
        for entry in expired:
            if succeeds:
                self.real.end(entry.message_id)
                del self.model[entry.message_id]
            else:
                self.real.put_back(entry)

    def due(self, kept):
        return kept[1] <= self.now

    @invariant()
    def the_same_messages_are_unfinished(self):
        assert {entry.message_id: entry.deadline for entry in self.real} == {k: v[1] for k, v in self.model.items()}

    @invariant()
    def the_smallest_offset_is_that_of_the_first_start_marker(self):
        assert self.real.smallest_offset() == min((kept[0] for kept in self.model.values()), default=None)

    @invariant()
    def it_is_known_whether_something_expired(self):
        assert self.real.has_expired(float(self.now)) == any(self.due(kept) for kept in self.model.values())


TestModel = Model.TestCase


def test_an_unknown_message_is_not_revived():
    """Keep-alive and end markers of a message without a start marker have no effect."""
    progress = InProgress()
    assert progress.keep_alive((0, 1), 5.0) is None
    assert not progress.end((0, 1))
    assert len(progress) == 0
    assert progress.expired(100.0) == []


def test_a_message_handed_out_twice_over_is_not_put_back_as_its_successor():
    """An entry that ended and started anew during its redelivery is not put back in place of the new one."""
    progress = InProgress()
    started(progress, (0, 1), 1)
    (old,) = progress.expired(10.0)
    started(progress, (0, 1), 2, deadline=99.0)
    progress.put_back(old)
    assert progress.expired(50.0) == []


def test_a_kept_alive_message_handed_out_comes_up_again():
    """A keep-alive between `expired` and the redelivery sets a new deadline, at which the entry expires again."""
    progress = InProgress()
    started(progress, (0, 1), 1)
    (entry,) = progress.expired(10.0)
    progress.keep_alive((0, 1), 30.0)
    assert progress.expired(20.0) == []
    assert progress.expired(30.0) == [entry]


def test_the_load_of_each_queue():
    """Each queue has its count and its oldest start."""
    progress = InProgress()
    for number, queue in enumerate([b"a", b"b", b"a"]):
        progress.start((0, number), queue=queue, marker_offset=number, started=number, deadline=9.0, start=None)
    assert progress.by_queue() == {b"a": (2, 0), b"b": (1, 1)}


@given(st.integers(1, 30))
def test_finished_messages_take_no_room(unfinished):
    """The heap stays within twice the unfinished messages and a constant, however many have finished."""
    progress = InProgress()
    for number in range(6000):
        started(progress, (0, number), number, deadline=float(10_000 + number))
        if number >= unfinished:
            progress.end((0, number))
    assert len(progress) == unfinished
    assert progress.heap_size <= 2 * (unfinished + 1) + 1025
    assert progress.smallest_offset() == 0


def test_what_expired_is_handed_out_by_deadline():
    """Expired messages come in the order of their deadlines, also if a keep-alive has changed it."""
    progress = InProgress()
    started(progress, (0, 1), 1, deadline=6.0)
    progress.keep_alive((0, 1), 7.0)
    started(progress, (0, 2), 2, deadline=6.0)
    assert [entry.message_id for entry in progress.expired(7.0)] == [(0, 2), (0, 1)]
