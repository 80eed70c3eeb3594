"""The judges of the fault tests: each kind of fault is found."""

from tests.acceptance.terms import Term, overlaps, terms_of
from tests.acceptance.verdict import Item, Sighting, judge


def _items(*numbers, key="k", topic="t"):
    return [Item(topic, key, n) for n in numbers]


def _sightings(*numbers, key="k", topic="t"):
    return [Sighting(item, f"{topic}/{key}:{item.n}") for item in _items(*numbers, key=key, topic=topic)]


def test_a_complete_topic_in_order_is_flawless():
    """A complete topic is flawless though its keys are interleaved."""
    mixed = [
        sighting for pair in zip(_sightings(1, 2, 3), _sightings(1, 2, 3, key="l"), strict=True) for sighting in pair
    ]
    verdict = judge(_items(1, 2, 3) + _items(1, 2, 3, key="l"), mixed)
    verdict.assert_flawless()
    assert (verdict.committed, verdict.received) == (6, 6)


def test_a_missing_record_is_lost():
    """A lost record is named, whether it was the last one or in the middle."""
    verdict = judge(_items(1, 2, 3, 4), _sightings(1, 3))
    assert verdict.lost == _items(2, 4)
    assert not verdict.reversals


def test_a_rolled_back_record_is_a_stranger():
    """A record that was never committed is a stranger on the topic."""
    assert judge(_items(1), _sightings(1, 2)).strangers == _items(2)


def test_adjacent_repeats_are_no_reversal():
    """R0 R0 R1 is allowed at least once, also with messages of other keys in between."""
    others = _sightings(1, key="l")
    verdict = judge(_items(1, 2) + _items(1, key="l"), [*_sightings(1), *others, *_sightings(1, 1, 2)])
    verdict.assert_in_order()
    assert (verdict.adjacent_repeats, verdict.distant_repeats) == (2, 0)


def test_a_distant_repeat_is_a_reversal():
    """R0 R1 R0 R1 is complete, and yet a reversal."""
    verdict = judge(_items(1, 2), _sightings(1, 2, 1, 2))
    verdict.assert_complete()
    assert verdict.reversals == [(Item("t", "k", 2), Item("t", "k", 1))]
    assert (verdict.adjacent_repeats, verdict.distant_repeats) == (0, 2)


def test_an_overtaken_record_is_a_reversal():
    """R1 R0 has no repeat, and is a reversal."""
    verdict = judge(_items(1, 2), _sightings(2, 1))
    assert len(verdict.reversals) == 1
    assert verdict.repeats == 0


def test_the_same_key_on_two_topics_is_two_keys():
    """Order holds within a topic and key."""
    judge(_items(1, 2) + _items(1, 2, topic="u"), _sightings(1, 2) + _sightings(1, 2, topic="u")).assert_flawless()


def test_records_without_a_key_have_no_order():
    """Records without a key may come in any order; their repeats are counted, and their losses found."""
    sightings = [Sighting(Item("t", None, n), f"x:{n}") for n in (3, 1, 2, 1)]
    verdict = judge(_items(1, 2, 3, 4, key=None), sightings)
    assert not verdict.reversals
    assert (verdict.lost, verdict.repeats) == (_items(4, key=None), 1)


def test_an_outbox_id_on_two_records_is_found():
    """One outbox-id on two records is a fault: a consumer that drops repeats by id would lose the second record."""
    sightings = [Sighting(Item("t", "k", 1), "x:1"), Sighting(Item("t", "k", 2), "x:1")]
    assert judge(_items(1, 2), sightings).mislabelled == ["x:1"]


def test_a_repeat_under_another_outbox_id_is_found():
    """A repeat with another outbox-id is a fault: a consumer that drops repeats by id would keep it."""
    sightings = [Sighting(Item("t", "k", 1), "x:1"), Sighting(Item("t", "k", 1), "x:2")]
    assert judge(_items(1), sightings).mislabelled == _items(1)


def _journal(*entries):
    return [{"event": event, "leader_id": leader_id, "at": at, **more} for event, leader_id, at, more in entries]


def test_a_term_ends_with_its_lease_or_its_event_whichever_is_earlier():
    """Renewals extend a term, an event cuts it short, and an event after the deadline does not extend it."""
    journal = _journal(
        ("LeaderAcquired", "a", 1.0, {"deadline": 6.0}),
        ("lease", "a", 2.0, {"deadline": 7.0}),
        ("LeaderRevoked", "a", 3.0, {}),
        ("LeaderAcquired", "b", 10.0, {"deadline": 15.0}),
        ("lease", "b", 11.0, {"deadline": 16.0}),
        ("LeaderRefreshed", "c", 12.0, {}),
        ("LeaderFenced", "b", 20.0, {}),
    )
    assert terms_of("p", journal) == [Term("p", 1.0, 3.0, "a"), Term("p", 10.0, 16.0, "b")]


def test_the_lease_of_a_killed_leader_still_counts():
    """The term of a journal that breaks off ends with the last lease."""
    journal = _journal(("LeaderAcquired", "a", 1.0, {"deadline": 6.0}), ("lease", "a", 2.0, {"deadline": 7.0}))
    assert terms_of("p", journal) == [Term("p", 1.0, 7.0, "a")]


def test_two_leaders_at_once_are_found():
    """Terms of different processes overlap when one begins before another ends, however many lie between."""
    long = Term("p", 0.0, 10.0, "a")
    short, late = Term("q", 2.0, 3.0, "b"), Term("r", 5.0, 6.0, "c")
    assert overlaps([late, long, short]) == [(long, short), (long, late)]


def test_terms_that_only_touch_do_not_overlap():
    """Terms do not overlap if one begins when another ends, nor if they are of the same process."""
    assert not overlaps([Term("p", 0.0, 1.0, "a"), Term("q", 1.0, 2.0, "b"), Term("q", 1.5, 3.0, "c")])
