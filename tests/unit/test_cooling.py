"""Keys, and records without one, rest after failures, longer each time, until they succeed."""

from outbox_core.harvest.cooling import Cooling


class _Clock:
    time = 100.0

    def __call__(self):
        return self.time


def _record(topic, key, identity=1):
    return (identity, topic, key, b"", None, None, -1, 0)


def test_rests_double_up_to_the_longest():
    """Each failure in a row doubles a lane's rest, up to the bound."""
    clock = _Clock()
    cooling = Cooling(1.0, 5.0, clock)
    for length in (1.0, 2.0, 4.0, 5.0, 5.0):
        cooling.failed(_record("t", "a"))
        clock.time += length - 0.01
        assert cooling.resting().lanes == {("t", "a")}
        clock.time += 0.02
        assert cooling.resting().lanes == frozenset()


def test_success_forgets_the_failures():
    """After a success the next rest is the first one again; records without a key have none to forget."""
    clock = _Clock()
    cooling = Cooling(1.0, 64.0, clock)
    for _ in range(4):
        cooling.failed(_record("t", "a"))
    assert cooling
    cooling.succeeded([_record("t", None), _record("t", "b"), _record("t", "a")])
    assert not cooling
    assert cooling.resting().lanes == frozenset()
    cooling.failed(_record("t", "a"))
    clock.time += 1.01
    assert cooling.resting().lanes == frozenset()


def test_lanes_rest_independently():
    """A lane's failures and successes say nothing about another with the same key or the same topic."""
    clock = _Clock()
    cooling = Cooling(1.0, 8.0, clock)
    cooling.failed(_record("t", "a"))
    cooling.failed(_record("u", "a"))
    cooling.failed(_record("u", "a"))
    cooling.failed(_record("t", "b"))
    cooling.succeeded([_record("t", "b")])
    assert cooling.resting().lanes == {("t", "a"), ("u", "a")}
    clock.time += 1.5
    assert cooling.resting().lanes == {("u", "a")}


def test_a_rest_that_is_over_is_remembered_until_success():
    """A lane that has rested is still known to have failed, so that its next rest is longer."""
    clock = _Clock()
    cooling = Cooling(1.0, 8.0, clock)
    cooling.failed(_record("t", "a"))
    clock.time += 60
    assert cooling
    cooling.failed(_record("t", "a"))
    clock.time += 1.5
    assert cooling.resting().lanes == {("t", "a")}


def test_record_without_a_key_rests_alone():
    """It has no followers to hold up, so it is known by its id."""
    clock = _Clock()
    cooling = Cooling(1.0, 8.0, clock)
    cooling.failed(_record("t", None, identity=7))
    assert cooling.resting() == (frozenset(), {7})
    cooling.succeeded([_record("t", None, identity=8)])
    assert cooling.resting().identities == {7}
    cooling.succeeded([_record("t", None, identity=7)])
    assert not cooling
