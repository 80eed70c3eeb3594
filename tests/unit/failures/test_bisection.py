"""The search for the record that made a transaction fail: it splits groups, and keeps the order of each key."""

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.harvest.failures.bisection import Bisection
from outbox_core.kafka.clients import KafkaError
from outbox_core.stores.interface import NO_LIMIT, StoredRecord

TOO_LARGE, INVALID = KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD
ROWS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 20), st.booleans()), min_size=1, max_size=60
)


def record(identity, key, size=1):
    """Return a stored record."""
    return StoredRecord(identity, "t", key, b"x" * size, None, None, -1, 0)


def handle(rows, code, named):
    """Try groups until none is left, as exactly-once delivery does; return the published and the bad records."""
    records = [record(identity, key, size) for identity, (key, size, _) in enumerate(rows)]
    bad = {identity for identity, (_, size, is_bad) in enumerate(rows) if (size > 10 if code == TOO_LARGE else is_bad)}
    bisection, held, published, tried = Bisection(10_000, NO_LIMIT), set(), [], 0
    bisection.add(records)
    held_keys = set()
    while bisection:
        tried += 1
        group = bisection.next(lambda row: row[2] in held_keys)
        guilty = [row for row in group if row[0] in bad]
        if not group or not guilty:
            published += group
        elif len(group) == 1:
            held.add(group[0][0])
            bisection.note_too_large(group[0], code)
            if group[0][2] is not None:
                held_keys.add(group[0][2])
        else:
            bisection.split(group, {row[0] for row in guilty} if named else (), code)
        assert tried < 40 * len(rows) + 40, "no progress"
    return records, bad, held, published


@given(ROWS, st.sampled_from([TOO_LARGE, INVALID, None]), st.booleans())
def test_only_the_bad_are_held_and_keys_keep_their_order(rows, code, named):
    """The records before the first bad one of their key are published, in order; of the others only that is held."""
    records, bad, held, published = handle(rows, code, named)
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
    """Once one size is known to be too large, larger records are tried alone, and the small ones in one go."""
    bisection, tries, rows = Bisection(10_000, NO_LIMIT), 0, 2_000
    large = set(range(0, rows, 50))
    bisection.add([record(n, f"k{n}", 1000 if n in large else 10) for n in range(rows)])
    held = set()
    while bisection:
        tries += 1
        group = bisection.next(lambda _: False)
        guilty = [row for row in group if row[0] in large]
        if len(group) == 1 and guilty:
            held.add(group[0][0])
            bisection.note_too_large(group[0], TOO_LARGE)
        elif guilty:
            bisection.split(group, (), TOO_LARGE)
    assert held == large
    assert tries < len(large) + 20


def test_trials_take_a_bounded_share_of_the_time():
    """A trial has time only once ordinary work has earned it."""
    bisection = Bisection(3, NO_LIMIT)
    assert bisection.has_time
    bisection.spent_retrying(1.0)
    assert not bisection.has_time
    bisection.spent_publishing(3.9)
    assert not bisection.has_time
    bisection.spent_publishing(0.2)
    assert bisection.has_time


def test_too_much_in_memory_does_not_wait():
    """Too many records or bytes set aside exceed the limit, until they have been tried."""
    bisection = Bisection(3, 100)
    bisection.add([record(1, "a"), record(2, "b")])
    bisection.add([record(3, "c")])
    assert not bisection.is_over_limit
    bisection.add([record(4, "d")])
    assert bisection.is_over_limit
    assert len(bisection.next(lambda _: False)) == 2
    assert not bisection.is_over_limit
    bisection.add([large := record(5, "e", 90), record(6, "f", 9)])
    assert bisection.is_over_limit
    while bisection:
        group = bisection.next(lambda row: row[0] == 6)
    assert group == [large]
    assert not bisection.is_over_limit
    bisection.split([large, record(7, "g", 20)], (), INVALID)
    assert bisection.is_over_limit
    bisection.next(lambda _: True)
    assert not bisection.is_over_limit


def test_what_goes_back_takes_along_what_is_set_aside_of_its_key():
    """A key whose record goes back to the table drops its set-aside records, which must not overtake it."""
    bisection = Bisection(100, 10**6)
    bisection.add([record(1, "k"), record(2, "m")])
    bisection.add([record(3, "k"), record(4, "m")])
    closed = {"k"}
    assert bisection.next(lambda one: one[2] in closed) == [record(2, "m")]
    assert bisection.left_some_out
    closed.clear()
    assert bisection.next(lambda one: one[2] in closed) == [record(4, "m")]
    assert not bisection
