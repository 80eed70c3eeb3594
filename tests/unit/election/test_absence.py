"""The time out of the group: why a member comes back, and when."""

import threading

import pytest

from outbox_core.election.absence import AbilityQuestion, Look, SteppedDown, UnableToLead
from outbox_core.kafka import duty

SESSION = 6.0
LEASE = 5.0
LEFT_AT = 100.0


class _Answer:
    """A question that was answered, or not."""

    is_able = False
    is_over = False

    def end(self):
        self.is_over = True


def unable():
    """Return the absence of an owner that could not lead, with the looks that it sends."""
    sent = []
    absence = UnableToLead("it could not lead", SESSION, LEASE, lambda look, **_: sent.append(look))
    absence.begins(LEFT_AT)
    return absence, sent


def test_a_look_must_come_back():
    """Acknowledged alone, or read as far alone, a look is not back: each needs one direction of the link."""
    acknowledged, read, both, before = Look(), Look(), Look(), Look()
    acknowledged.acknowledged(7)
    read.read(7)
    both.read(9)
    both.acknowledged(7)
    before.read(6)
    before.acknowledged(7)
    assert [look.is_back for look in (acknowledged, read, both, before)] == [False, False, True, False]


def test_an_offset_that_kafka_does_not_tell():
    """A look whose offset is not known is not back, whatever is read."""
    look = Look()
    look.read(7)
    look.acknowledged(-1)
    assert not look.is_back


def test_who_could_not_lead_comes_back_by_its_look():
    """It stays out for a session, and for as long as no look has come back."""
    absence, sent = unable()
    assert absence.news(LEFT_AT, LEFT_AT) == ""
    [look] = sent
    look.acknowledged(7)
    absence.read(7)
    assert absence.news(LEFT_AT + SESSION - 0.1, LEFT_AT) == ""
    assert absence.news(LEFT_AT + SESSION, LEFT_AT)
    assert len(sent) == 1


def test_a_slow_link_is_good_enough():
    """A look may take as long to come back as a leader's heartbeat."""
    absence, sent = unable()
    absence.news(LEFT_AT, LEFT_AT)
    for tenth in range(45):
        assert absence.news(LEFT_AT + tenth / 10, LEFT_AT) == ""
    [look] = sent
    look.acknowledged(7)
    absence.read(7)
    assert absence.news(LEFT_AT + SESSION, LEFT_AT)


def test_who_cannot_write_stays_out_for_ever():
    """A look in each time of a lease, none acknowledged: silence of all others does not bring this member back."""
    absence, sent = unable()
    for second in range(100):
        absence.read(second)
        assert absence.news(LEFT_AT + second, LEFT_AT) == ""
    assert len(sent) == 20
    sent[0].acknowledged(3)  # late: it says nothing of now
    assert absence.news(LEFT_AT + 101, LEFT_AT) == ""


def test_looks_by_other_clients():
    """The first look goes by new clients, which may know another leader, and then ever fewer: slow ones get time."""
    made = []
    absence = UnableToLead("it could not lead", SESSION, LEASE, lambda _, *, anew: made.append(anew))
    absence.begins(LEFT_AT)
    for second in range(100):
        assert absence.news(LEFT_AT + second, LEFT_AT) == ""
    assert [number for number, anew in enumerate(made, 1) if anew] == [1, 2, 4, 8, 16]


def stepped_down():
    """Return the absence of an application that cannot work, with the answer to its question."""
    answer = _Answer()
    absence = SteppedDown("no database", SESSION, answer)
    absence.begins(LEFT_AT)
    return absence, answer


def test_who_is_able_again_comes_back():
    """It comes back once it is able, and not before a session: the assignor would give the partition back."""
    absence, answer = stepped_down()
    assert absence.news(LEFT_AT + SESSION, LEFT_AT + SESSION) == ""
    answer.is_able = True
    assert absence.news(LEFT_AT + SESSION - 0.1, LEFT_AT + 5) == ""
    assert absence.news(LEFT_AT + SESSION, LEFT_AT + 5) == "it is able again"


def test_somebody_must_try():
    """Without a leader it comes back although it is not able, and not while one is heard."""
    absence, _ = stepped_down()
    most = duty.SILENCE_SECONDS + duty.SILENCE_JITTER_SECONDS
    for second in range(100):
        assert absence.news(LEFT_AT + second, LEFT_AT + second) == ""
    heard_at = LEFT_AT + 99
    assert absence.news(heard_at + duty.SILENCE_SECONDS - 0.1, heard_at) == ""
    assert absence.news(heard_at + most, heard_at).startswith("no leader was heard for 15 s")


@pytest.mark.parametrize(("session", "silence"), [(1.2, 10.0), (6.0, 10.0), (126.0, 130.0)])
def test_the_silence_is_longer_than_a_session(session, silence):
    """A successor of a leader that died is not heard before the session is over: only then somebody must try."""
    absence = SteppedDown("no database", session, _Answer())
    absence.begins(LEFT_AT)
    most = silence + duty.SILENCE_JITTER_SECONDS
    assert absence.news(LEFT_AT + silence - 0.1, LEFT_AT) == ""
    assert absence.news(LEFT_AT + most, LEFT_AT).startswith("no leader was heard for")
    assert absence.condition == f"it is able again, or no process leads for {silence:g} s"


def test_an_absence_ends_its_question():
    """Whoever comes back, or stops, is not asked any more."""
    absence, answer = stepped_down()
    absence.end()
    assert answer.is_over


@pytest.fixture
def short_pauses(monkeypatch):
    """Have questions asked at once."""
    monkeypatch.setattr("outbox_core.election.absence.FIRST_PROBE_SECONDS", 0.01)
    monkeypatch.setattr("outbox_core.election.absence.LAST_PROBE_SECONDS", 0.01)


@pytest.mark.usefixtures("short_pauses")
def test_a_question_that_raises_is_a_no(caplog):
    """It is asked again, on a daemon thread, until the answer is yes; its errors are logged once."""
    answers, asked = iter([ZeroDivisionError, False, ZeroDivisionError, True]), []
    done = threading.Event()

    def ask():
        asked.append(threading.current_thread())
        answer = next(answers)
        if answer is ZeroDivisionError:
            raise answer
        if answer:
            done.set()
        return answer

    question = AbilityQuestion("neli-shop-able", ask)
    assert done.wait(10)
    asked[0].join(10)
    assert question.is_able
    assert [len(asked), asked[0].daemon, asked[0].name] == [4, True, "neli-shop-able"]
    assert len([record for record in caplog.records if record.exc_info]) == 1


@pytest.mark.usefixtures("short_pauses")
def test_a_question_that_is_over():
    """After `end` it is not asked again, even if it hung meanwhile; the answer counts no more."""
    is_asked, may_go = threading.Event(), threading.Event()
    calls = []

    def ask():
        calls.append(threading.current_thread())
        is_asked.set()
        may_go.wait(10)
        return False

    question = AbilityQuestion("neli-shop-able", ask)
    assert is_asked.wait(10)
    question.end()
    may_go.set()
    calls[0].join(10)
    assert len(calls) == 1
    assert not calls[0].is_alive()
