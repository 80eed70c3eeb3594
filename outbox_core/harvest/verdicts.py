"""What an error of Kafka says about a record: the one place where codes are sorted.

- `RECORD`: perhaps the record's own fault. A report names a whole batch, and a too-large record fails its neighbours
  with the same code; so the record is bad only if it fails with such a code *alone*. Then it is held.
- `FORBIDDEN`: we may not write to the topic. The topic is held.
- `AWAY`: the topic is not there. It may be on its way, or come back: it rests, and is tried again.
- `BROKEN`: the producer is of no more use, and is replaced.
- `RETRY`: nobody's fault: a time-out, a lost connection, too few replicas, and whatever is in no list here. What goes
  to that partition rests, and is tried again.

The lists are closed: a record is never given up for an error that is not in the first of them.
"""

from __future__ import annotations

from enum import Enum

from outbox_core.kafka import KafkaError


class Verdict(Enum):
    """What an error is about."""

    RECORD = "record"
    FORBIDDEN = "forbidden"
    AWAY = "away"
    BROKEN = "broken"
    RETRY = "retry"


_RECORD = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
    KafkaError._INVALID_DIFFERENT_RECORD,  # noqa: SLF001  its public name, as those below
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001  the row names a partition that the topic does not have
    KafkaError._INVALID_ARG,  # noqa: SLF001  the row is no message
)

_AWAY = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
)

_BROKEN = (
    KafkaError._FATAL,  # noqa: SLF001
    KafkaError._FENCED,  # noqa: SLF001
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)

_VERDICTS: dict[int, Verdict] = {
    **dict.fromkeys(_RECORD, Verdict.RECORD),
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Verdict.FORBIDDEN,
    **dict.fromkeys(_AWAY, Verdict.AWAY),
    **dict.fromkeys(_BROKEN, Verdict.BROKEN),
}


def verdict_on(error: KafkaError) -> Verdict:
    """What the error is about."""
    return Verdict.BROKEN if error.fatal() else _VERDICTS.get(error.code(), Verdict.RETRY)


def is_bystander(error: KafkaError) -> bool:
    """Whether the record was given up only because another one, or its whole transaction, had failed."""
    return error.code() in _BYSTANDERS


_BYSTANDERS = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
        KafkaError._STATE,  # noqa: SLF001
        KafkaError._INCONSISTENT,  # noqa: SLF001
    }
)
