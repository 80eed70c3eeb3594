"""Which record made a transaction fail: groups, how they are split, and that the order of each key is kept."""

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.harvest.trials import Trials
from outbox_core.kafka import KafkaError
from outbox_core.ports import NO_LIMIT

TOO_LARGE, INVALID = KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD
ROWS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 20), st.booleans()), min_size=1, max_size=60
)


def record(identity, key, size=1):
    """A stored record."""
    return (identity, "t", key, b"x" * size, None, None, -1, 0)


def judge(rows, code, named):
    """Try groups until none is left, as exactly-once delivery does; return what was published and what is bad."""
    records = [record(identity, key, size) for identity, (key, size, _) in enumerate(rows)]
    bad = {identity for identity, (_, size, is_bad) in enumerate(rows) if (size > 10 if code == TOO_LARGE else is_bad)}
    trials, held, published, tried = Trials(10_000, NO_LIMIT), set(), [], 0
    trials.set_aside(records)
    held_keys = set()
    while trials:
        tried += 1
        group = trials.next(lambda row: row[2] in held_keys)
        guilty = [row for row in group if row[0] in bad]
        if not group or not guilty:
            published += group
        elif len(group) == 1:
            held.add(group[0][0])
            trials.refused(group[0], code)
            if group[0][2] is not None:
                held_keys.add(group[0][2])
        else:
            trials.failed(group, {row[0] for row in guilty} if named else (), code)
        assert tried < 40 * len(rows) + 40, "no progress"
    return records, bad, held, published


@given(ROWS, st.sampled_from([TOO_LARGE, INVALID, None]), st.booleans())
def test_only_the_bad_are_held_and_keys_keep_their_order(rows, code, named):
    """Everything before the first bad record of its key is published, in order; of the rest only that one is held."""
    records, bad, held, published = judge(rows, code, named)
    assert held <= bad
    for key in ("a", "b", "c"):
        of_key = [row[0] for row in records if row[2] == key]
        first = next((identity for identity in of_key if identity in bad), None)
        expected = of_key if first is None else of_key[: of_key.index(first)]
        assert [row[0] for row in published if row[2] == key] == expected
        assert {identity for identity in held if identity in of_key} == (set() if first is None else {first})
    without_key = {row[0] for row in records if row[2] is None}
    assert {row[0] for row in published if row[2] is None} == without_key - bad
    assert held & without_key == bad & without_key


def test_large_ones_are_found_without_trying_all():
    """Once one size is known to be too large, larger ones are tried alone, and the small ones in one go."""
    trials, tries, rows = Trials(10_000, NO_LIMIT), 0, 2_000
    large = set(range(0, rows, 50))
    trials.set_aside([record(n, f"k{n}", 1000 if n in large else 10) for n in range(rows)])
    held = set()
    while trials:
        tries += 1
        group = trials.next(lambda _: False)
        guilty = [row for row in group if row[0] in large]
        if len(group) == 1 and guilty:
            held.add(group[0][0])
            trials.refused(group[0], TOO_LARGE)
        elif guilty:
            trials.failed(group, (), TOO_LARGE)
    assert held == large
    assert tries < len(large) + 20


def test_trials_take_a_bounded_share_of_the_time():
    """There is time for a trial only when ordinary work has earned it."""
    trials = Trials(3, NO_LIMIT)
    assert trials.have_time
    trials.tried(1.0)
    assert not trials.have_time
    trials.published(3.9)
    assert not trials.have_time
    trials.published(0.2)
    assert trials.have_time


def test_too_much_in_memory_does_not_wait():
    """Too many records or bytes that are set aside are told, until they have been tried."""
    trials = Trials(3, 100)
    trials.set_aside([record(1, "a"), record(2, "b")])
    trials.set_aside([record(3, "c")])
    assert not trials.are_too_many
    trials.set_aside([record(4, "d")])
    assert trials.are_too_many
    assert len(trials.next(lambda _: False)) == 2
    assert not trials.are_too_many
    trials.set_aside([large := record(5, "e", 90), record(6, "f", 9)])
    assert trials.are_too_many
    while trials:
        group = trials.next(lambda row: row[0] == 6)
    assert group == [large]
    assert not trials.are_too_many
    trials.failed([large, record(7, "g", 20)], (), INVALID)
    assert trials.are_too_many
    trials.next(lambda _: True)
    assert not trials.are_too_many


def test_what_goes_back_takes_along_what_is_set_aside_of_its_key():
    """The key opens before its later records are tried: they must not overtake the one in the table."""
    trials = Trials(100, 10**6)
    trials.set_aside([record(1, "k"), record(2, "m")])
    trials.set_aside([record(3, "k"), record(4, "m")])
    closed = {"k"}
    assert trials.next(lambda one: one[2] in closed) == [record(2, "m")]
    assert trials.let_go
    closed.clear()
    assert trials.next(lambda one: one[2] in closed) == [record(4, "m")]
    assert not trials
