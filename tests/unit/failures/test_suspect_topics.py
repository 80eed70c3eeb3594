"""SuspectTopics: the topics whose records end term after term, none of them because of an outage."""

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.harvest.failures.suspect_topics import SuspectTopics
from outbox_core.stores.interface import StoredRecord

MOST = 16


def batch(*topics):
    """Return one record for each topic."""
    return [StoredRecord(number, topic, None, b"", None, None, -1, 0) for number, topic in enumerate(topics)]


def play(table, poisoned, *, rounds, works=lambda _: True):
    """Publish a table of topics batch by batch, as terms do; return the held topics and the rest of the table."""
    suspicion, held = SuspectTopics(MOST), set()
    for number in range(rounds):
        hidden = held | suspicion.excluded
        topics = [topic for topic in table if topic not in hidden][: suspicion.limit]
        if not topics:
            suspicion.scan_found_none()
        elif works(number) and not poisoned & set(topics):
            suspicion.committed(batch(*topics))
            for topic in topics:
                table.remove(topic)
        else:
            suspicion.term_ended(batch(*topics), "invalid state")
        if suspicion.guilty:
            held.add(suspicion.guilty[0])
            suspicion.guilty_is_held()
    return held, table


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.sets(st.sampled_from("abcd"), max_size=2))
def test_the_poisoned_stop_nobody_else(table, poisoned):
    """Any number of poisoned topics, anywhere in the table, stop no other topic, and no other is held."""
    held, left = play(list(table), poisoned, rounds=400)
    assert held <= poisoned
    assert set(left) <= poisoned


def test_the_poisoned_are_held():
    """Poisoned topics are held if others are committed in between; alone they may be an outage of Kafka."""
    held, left = play(list("xabcy" * 20), {"x", "y"}, rounds=400)
    assert held == {"x", "y"} == set(left)
    assert play(["x"] * 3, {"x"}, rounds=100)[0] == set()


@given(st.lists(st.sampled_from("abc"), max_size=40), st.lists(st.booleans(), max_size=60))
def test_an_outage_convicts_nobody_while_it_lasts(table, failing):
    """Terms that all end during an outage, however long, convict no topic."""
    lasts = len(failing)
    held, left = play(list(table), set(), rounds=lasts + 60, works=lambda number: number >= lasts)
    assert held == set()
    assert left == []


def test_the_limit_comes_back():
    """Batches are halved while terms end, and grow again with every commit."""
    suspicion = SuspectTopics(MOST)
    for _ in range(4):
        suspicion.term_ended(batch(*"aabb"), "fenced")
    assert suspicion.limit == 2
    assert suspicion.is_failing
    for _ in range(4):
        suspicion.committed(batch("a", "b"))
    assert suspicion.limit == MOST
    assert not suspicion.is_failing
