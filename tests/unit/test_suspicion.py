"""Suspicion: which topic's records end term after term, and that an outage convicts nobody."""

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.harvest.suspicion import Suspicion

MOST = 16


def batch(*topics):
    """One record for each."""
    return [(number, topic, None, b"", None, None, -1, 0) for number, topic in enumerate(topics)]


def play(table, poisoned, *, rounds, works=lambda _: True):
    """Publish a table of topics batch by batch, as terms do; return the suspicion and what is left."""
    suspicion, held = Suspicion(MOST), set()
    for number in range(rounds):
        hidden = held | suspicion.left_out
        topics = [topic for topic in table if topic not in hidden][: suspicion.limit]
        if not topics:
            suspicion.found_nothing()
        elif works(number) and not poisoned & set(topics):
            suspicion.committed(batch(*topics))
            for topic in topics:
                table.remove(topic)
        else:
            suspicion.ended(batch(*topics), "invalid state")
        if suspicion.guilty:
            held.add(suspicion.guilty[0])
            suspicion.held()
    return held, table


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.sets(st.sampled_from("abcd"), max_size=2))
def test_the_poisoned_stop_nobody_else(table, poisoned):
    """Wherever they are in the table, and however many: all others are published, and none of those is held."""
    held, left = play(list(table), poisoned, rounds=400)
    assert held <= poisoned
    assert set(left) <= poisoned


def test_the_poisoned_are_held():
    """While others are committed in between; of those alone nobody can tell whether they or Kafka are to blame."""
    held, left = play(list("xabcy" * 20), {"x", "y"}, rounds=400)
    assert held == {"x", "y"} == set(left)
    assert play(["x"] * 3, {"x"}, rounds=100)[0] == set()


@given(st.lists(st.sampled_from("abc"), max_size=40), st.lists(st.booleans(), max_size=60))
def test_an_outage_convicts_nobody_while_it_lasts(table, failing):
    """Terms that all end, for as long as it may be, and then an end of it."""
    lasts = len(failing)
    held, left = play(list(table), set(), rounds=lasts + 60, works=lambda number: number >= lasts)
    assert held == set()
    assert left == []


def test_the_limit_comes_back():
    """Batches are halved while terms end, and grow again with every commit."""
    suspicion = Suspicion(MOST)
    for _ in range(4):
        suspicion.ended(batch(*"aabb"), "fenced")
    assert suspicion.limit == 2
    assert suspicion.is_failing
    for _ in range(4):
        suspicion.committed(batch("a", "b"))
    assert suspicion.limit == MOST
    assert not suspicion.is_failing
