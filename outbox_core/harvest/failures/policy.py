"""The decision on a failed record, for both deliveries; pure.

    it failed in a batch, with a code that a record may be to blame for --> try it alone
    it failed alone, with such a code -----> hold it, with its key, or make it a dead letter
    we may not write to its topic ---------> hold the topic
    any other error -----------------------> back off its partition, or its topic; try that again by one record
    the producer is broken ----------------> mark everything again, with a new producer

Without a writable table of holds, a record that would be held is backed off with its key. A dead letter is held
already: it stays so, and its hold tells the reason.
"""

from __future__ import annotations

from enum import Enum, auto

from outbox_core.harvest.failures.backoffs import Destination, destination_of_its_own
from outbox_core.kafka.errors import ErrorKind, kind_of
from outbox_core.kafka.messages import DeadLetter, Failure
from outbox_core.kafka.refusals import refusal_of
from outbox_core.stores.interface import NewHold


class Decision(Enum):
    """A decision on a failed record."""

    RETRY = auto()  # of the record, alone
    HOLD = auto()  # of the record, or of its topic: see `new_hold`
    BACKOFF = auto()  # of its destination: see `destination_of`
    REMARK = auto()  # of everything, with a new producer


def decide(failure: Failure, *, alone: bool, can_hold: bool) -> Decision:
    """Return the decision on a failure's record, `alone` if no other record can be to blame."""
    kind = failure.kind
    if kind is ErrorKind.FATAL:
        return Decision.REMARK
    if kind is ErrorKind.POISON and not alone:
        return Decision.RETRY
    if kind in (ErrorKind.POISON, ErrorKind.UNAUTHORIZED) and (can_hold or isinstance(failure.record, DeadLetter)):
        return Decision.HOLD
    return Decision.BACKOFF


def destination_of(failure: Failure) -> Destination:
    """Return the destination to back off after a failure: the record's own if no other record is concerned."""
    record, partition = failure.record, failure.partition
    if failure.kind is ErrorKind.POISON:
        return destination_of_its_own(record)
    if failure.kind in (ErrorKind.UNKNOWN_TOPIC, ErrorKind.UNAUTHORIZED) or isinstance(record, DeadLetter):
        return record.topic, None
    if partition is None:  # it was never on its way
        return destination_of_its_own(record)
    return record.topic, partition if partition >= 0 else None


def new_hold(failure: Failure, grant_write: str, *, dead_letter: bool, limits: str = "") -> NewHold:
    """Return the hold of a record that failed alone, or of its topic if we may not write to it.

    `limits` tells those of topic and client to which a record that is too large has to be compared.
    """
    record, error = failure.record, failure.error
    if kind_of(error) is ErrorKind.UNAUTHORIZED:
        return NewHold(record.topic, None, None, "not authorized", f"{error.str()}; {grant_write}")
    told = refusal_of(failure, limits)
    return NewHold(record.topic, record.key, record.id, "refused", told, dead_letter, record.create_time)
