"""The doorbell between an application and the harvesters embedded in it."""

from outbox_core import doorbell


def test_everybody_who_answers_hears_the_ring():
    """Several harvesters may live in one process; each leaves by itself, and twice does no harm."""
    heard = []
    leave_first = doorbell.answer(lambda: heard.append("first"))
    leave_second = doorbell.answer(lambda: heard.append("second"))
    doorbell.ring()
    assert heard == ["first", "second"]
    leave_first()
    leave_first()
    doorbell.ring()
    assert heard == ["first", "second", "second"]
    leave_second()
    doorbell.ring()
    assert len(heard) == 3


def test_one_callback_may_answer_twice():
    """Who leaves takes only himself away."""
    heard = []

    def note():
        heard.append(1)

    first, second = doorbell.answer(note), doorbell.answer(note)
    first()
    doorbell.ring()
    assert heard == [1]
    second()


def test_nobody_hears():
    """Without a harvester in the process there is nobody to ring for."""
    assert not doorbell.is_heard()
    leave = doorbell.answer(lambda: None)
    assert doorbell.is_heard()
    leave()
    assert not doorbell.is_heard()
