"""The one place that sorts Kafka's error codes, and writes error texts with their remedies.

The lists are closed: only an error in `POISON` makes the harvester give a record up.
"""

from __future__ import annotations

from enum import Enum

from outbox_core.kafka.clients import KafkaConfig, KafkaError


class ErrorKind(Enum):
    """The subject of an error of Kafka."""

    # A report names a whole batch, and a too-large record fails its neighbours with the same code.
    POISON = "poison"  # perhaps the record: it is held if it fails with such a code alone
    UNAUTHORIZED = "unauthorized"  # we may not write to the topic: the topic is held
    UNKNOWN_TOPIC = "unknown-topic"  # it may yet be created: retried with backoff
    FATAL = "fatal"  # the producer is broken, and is replaced
    TRANSIENT = "transient"  # the cluster, and every code in no list here: the partition is retried with backoff


_POISON = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
    KafkaError._INVALID_DIFFERENT_RECORD,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    KafkaError._UNKNOWN_PARTITION,  # the row names a partition that the topic does not have
    KafkaError._INVALID_ARG,  # the row is no message
)
_UNKNOWN_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID, KafkaError._UNKNOWN_TOPIC)
_FATAL = (KafkaError._FATAL, KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)

_KINDS: dict[int, ErrorKind] = {
    **dict.fromkeys(_POISON, ErrorKind.POISON),
    KafkaError.TOPIC_AUTHORIZATION_FAILED: ErrorKind.UNAUTHORIZED,
    **dict.fromkeys(_UNKNOWN_TOPIC, ErrorKind.UNKNOWN_TOPIC),
    **dict.fromkeys(_FATAL, ErrorKind.FATAL),
}


def kind_of(error: KafkaError) -> ErrorKind:
    """Return the subject of an error."""
    return ErrorKind.FATAL if error.fatal() else _KINDS.get(error.code(), ErrorKind.TRANSIENT)


PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""Codes of messages that the client dropped because it was told to."""

_COLLATERAL = PURGED | {KafkaError._STATE, KafkaError._INCONSISTENT}

TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE})
"""Codes of a batch that is larger than the broker accepts."""

NEVER_ACCEPTED = TOO_LARGE | {KafkaError.INVALID_RECORD}
"""Codes of a message of a queue that no retry delivers."""

TORN = frozenset({KafkaError.INVALID_TXN_STATE, KafkaError.INVALID_PRODUCER_ID_MAPPING})
"""Codes by which a broker says that our open transaction is not open."""

AUTHORIZATION_FAILED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
"""Codes of a missing right."""

TOPIC_FORBIDDEN = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
"""Codes of a missing right on a topic."""

NO_SUCH_PARTITION = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)
"""Codes of a topic or partition that is missing."""

UNREADABLE_TOPIC = NO_SUCH_PARTITION | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
"""Codes of a topic that a consumer cannot read until an operator acts."""

NO_ANSWER = frozenset({KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})
"""Codes of a request that was not answered in time."""

MAYBE_DELIVERED = NO_ANSWER | {
    KafkaError._MSG_TIMED_OUT,
    KafkaError._PURGE_INFLIGHT,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
}
"""Codes of a message that may be in the topic all the same."""

CONSUMER_RECOVERS = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError.GROUP_AUTHORIZATION_FAILED,  # no group is joined; the client looks for its coordinator all the same
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
    }
)
"""Codes that a consumer with assigned partitions gets over by itself, beside those that are retriable."""

# What the client reports to a member of a consumer group.

GROUP_MOVED = frozenset(
    {
        KafkaError._STATE,
        KafkaError._NO_OFFSET,
        KafkaError._ASSIGNMENT_LOST,
        KafkaError._WAIT_COORD,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
"""Codes of a commit of offsets that failed because the group or its coordinator has changed."""

MEMBER_RECOVERS = GROUP_MOVED | {
    KafkaError._MAX_POLL_EXCEEDED,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
}
"""Codes in place of a record, or of a commit of its offset, that a member recovers from by itself."""

MEMBER_HOPELESS = AUTHORIZATION_FAILED | {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError._AUTHENTICATION,
}
"""Codes that stop a member: they last until an operator acts."""


def is_collateral(error: KafkaError) -> bool:
    """Tell whether a record failed only because another one, or its whole transaction, had failed."""
    return error.code() in _COLLATERAL


_SASL_DEFAULT = "GSSAPI"
_ANONYMOUS = "User:ANONYMOUS"


def principal_of(config: KafkaConfig) -> str:
    """Return the principal of a client's settings, never a secret.

    Only the broker knows that of a certificate or a token: for those the text says how the client authenticates.
    """
    protocol = str(config.get("security.protocol", "plaintext")).lower()
    if protocol.startswith("sasl"):
        mechanism = str(config.get("sasl.mechanisms") or config.get("sasl.mechanism") or _SASL_DEFAULT).upper()
        if mechanism == "GSSAPI":
            return f"the Kerberos principal {config.get('sasl.kerberos.principal', 'kafkaclient')}"
        if mechanism == "OAUTHBEARER":
            client = config.get("sasl.oauthbearer.client.id")
            return "the subject of its OAUTHBEARER token" + (f" (client {client})" if client else "")
        return f"User:{config.get('sasl.username', '')}"
    if protocol == "ssl":
        for name in ("ssl.certificate.location", "ssl.keystore.location"):
            if config.get(name):
                return f"the subject of the certificate in {config[name]} ({name})"
        if config.get("ssl.certificate.pem"):
            return "the subject of the certificate in ssl.certificate.pem"
    return _ANONYMOUS


def grant(rights: str, config: KafkaConfig, on: str = "it") -> str:
    """Return the remedy for missing rights, such as `grant READ and WRITE on topic 'orders' to User:shop`."""
    return f"grant {rights} on {on} to {principal_of(config)}"


def explained(error: KafkaError, config: KafkaConfig) -> str:
    """Return an error's text, with the principal that lacks a right."""
    return f"{error.str()}, as {principal_of(config)}" if error.code() in AUTHORIZATION_FAILED else error.str()


def why_no_manifest(topic: str | None, error: KafkaError | None) -> str:
    """Return the text of a tracking topic's error, with the remedy where the topic has too small a limit."""
    if error is None:
        return f"tracking topic {topic!r} does not answer"
    remedy = "; raise its max.message.bytes: 1048588 is Kafka's default" if error.code() in TOO_LARGE else ""
    return f"tracking topic {topic!r} takes no manifest: {error.str()}{remedy}"


def why_unreadable(error: KafkaError, config: KafkaConfig, topic: str, group: str = "") -> str:
    """Return the text of a consumer's error, with the remedy for a missing right."""
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return f"{error.str()}; {grant('READ', config, f'topic {topic!r}')}"
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and group:
        return f"{error.str()}; {grant('READ', config, f'group {group!r}')}"
    return explained(error, config)
