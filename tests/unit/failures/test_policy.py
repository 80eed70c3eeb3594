"""The decision about each record that was not delivered."""

import pytest

from outbox_core.harvest.failures.policy import Decision, decide, destination_of
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.messages import Failure, dead_letter
from outbox_core.stores.interface import StoredRecord

RECORD = StoredRecord(1, "t", "k", b"", None, None, -1, 0)
LETTER = dead_letter(RECORD, "dead", "boo")
FATAL, AWAY = KafkaError(KafkaError._FATAL), KafkaError(KafkaError._MSG_TIMED_OUT)
POISON, DENIED = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
NO_TOPIC = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)


@pytest.mark.parametrize(
    ("record", "error", "alone", "can_hold", "decision"),
    [
        (RECORD, FATAL, True, True, Decision.REMARK),
        (RECORD, POISON, False, True, Decision.RETRY),
        (RECORD, POISON, True, True, Decision.HOLD),
        (RECORD, POISON, True, False, Decision.BACKOFF),
        (LETTER, POISON, True, False, Decision.HOLD),
        (RECORD, DENIED, False, True, Decision.HOLD),
        (RECORD, DENIED, False, False, Decision.BACKOFF),
        (RECORD, NO_TOPIC, True, True, Decision.BACKOFF),
        (RECORD, AWAY, True, True, Decision.BACKOFF),
    ],
)
def test_decisions(record, error, alone, can_hold, decision):
    """Only a record that was refused alone is held, or its topic for a missing right; others are tried again."""
    assert decide(Failure(record, error), alone=alone, can_hold=can_hold) is decision


@pytest.mark.parametrize(
    ("record", "error", "partition", "destination"),
    [
        (RECORD, AWAY, 0, ("t", 0)),
        (RECORD, AWAY, 3, ("t", 3)),
        (RECORD, AWAY, -1, ("t", None)),
        (RECORD, AWAY, None, ("t", ("t", "k"))),
        (RECORD, POISON, 0, ("t", ("t", "k"))),
        (RECORD, DENIED, 0, ("t", None)),
        (RECORD, NO_TOPIC, 0, ("t", None)),
        (LETTER, AWAY, 0, ("dead", None)),
    ],
)
def test_destinations(record, error, partition, destination):
    """A record that does not arrive keeps others waiting only where they cannot arrive either."""
    assert destination_of(Failure(record, error, partition=partition)) == destination
