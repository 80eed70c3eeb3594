"""The only importer of confluent_kafka: factories of clients, and the client's names that other modules use.

librdkafka's log lines go to the logger `outbox_core.kafka.clients` at DEBUG, as it repeats itself at every attempt to
connect; the callers log each change of state once.

**Every error of a factory is a KafkaUnavailable**, so whoever runs for long tries again: clients are made anew at each
leadership, for each question to the cluster and after a fatal error, and what they need may be away for a moment (the
endpoint of OAuth tokens, a file of certificates that is being replaced). What can be wrong with the settings themselves
is a `ClientRefused`, which is an InvalidConfig, too: it ends a process that starts.

**A callback of the user's ends no thread.** confluent_kafka raises its errors from `poll` and `flush`. Here they are
logged, once for each kind.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from outbox_core.callbacks import log_once
from outbox_core.errors import ClientExhausted, ClientRefused, InvariantBroken, KafkaUnavailable

__all__ = [
    "OFFSET_BEGINNING",
    "OFFSET_END",
    "TIMESTAMP_LOG_APPEND_TIME",
    "TIMESTAMP_NOT_AVAILABLE",
    "AclBindingFilter",
    "AclOperation",
    "AclPermissionType",
    "AdminClient",
    "AlterConfigOpType",
    "ClusterMetadata",
    "ConfigEntry",
    "ConfigResource",
    "ConfigSource",
    "Consumer",
    "KafkaConfig",
    "KafkaError",
    "KafkaException",
    "Message",
    "NewPartitions",
    "NewTopic",
    "Producer",
    "ResourcePatternType",
    "ResourceType",
    "TopicCollection",
    "TopicPartition",
    "discard",
    "make_admin",
    "make_consumer",
    "make_producer",
]

KafkaConfig = Mapping[str, Any]

_DISCARD_SECONDS = 2.0
_END_SECONDS = 1.0
_DISCARD_POLL_SECONDS = 0.01
_NOTICE = 5  # of syslog's levels

_LIKENESS = 0.8

_OAUTH = "oauth_cb"
_CALLBACKS = ("error_cb", "stats_cb", "throttle_cb", "on_commit", _OAUTH)
_NO_TOKEN = frozenset({KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._AUTHENTICATION})  # noqa: SLF001
"""Codes of a constructor that waited for a token in vain; a wrong password shows only when a client has connected."""

_COMMON_PROPERTIES = """
    acks bootstrap.servers client.id compression.type delivery.timeout.ms enable.idempotence
    enable.ssl.certificate.verification linger.ms message.max.bytes partitioner reconnect.backoff.max.ms
    reconnect.backoff.ms request.timeout.ms retries sasl.kerberos.keytab sasl.kerberos.principal
    sasl.kerberos.service.name sasl.mechanism sasl.mechanisms sasl.oauthbearer.client.id
    sasl.oauthbearer.client.secret sasl.oauthbearer.config sasl.oauthbearer.method sasl.oauthbearer.scope
    sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol session.timeout.ms
    socket.connection.setup.timeout.ms socket.keepalive.enable socket.timeout.ms ssl.ca.location ssl.ca.pem
    ssl.certificate.location ssl.certificate.pem ssl.cipher.suites ssl.endpoint.identification.algorithm
    ssl.key.location ssl.key.password ssl.key.pem ssl.keystore.location ssl.keystore.password
""".split()  # noqa: SIM905  a list would take a line for each
"""The properties that people set, to suggest one: the client has no list of them."""

_client_log = logging.getLogger(__name__)


class _DebugLogger(logging.LoggerAdapter[logging.Logger]):
    """Lowers every librdkafka log line to DEBUG."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        del level
        super().log(logging.DEBUG, msg, *args, **kwargs)


def make_producer(config: KafkaConfig) -> Producer:
    """Make a producer; raises KafkaUnavailable, as ClientRefused for what may be wrong in the settings."""
    producer: Producer = _make(Producer, config)
    return producer


def discard(producer: Producer) -> None:
    """Purge a producer before it is thrown away.

    librdkafka 2.16 corrupts its memory when a fenced transactional producer is destroyed with messages in it.
    """
    with suppress(KafkaException):
        producer.purge()
    end = time.monotonic() + _DISCARD_SECONDS
    while len(producer) and time.monotonic() < end:
        with suppress(KafkaException):  # a broken producer says so once more
            producer.poll(_DISCARD_POLL_SECONDS)


def end_client(close: Callable[[], object]) -> None:
    """End a client by its `close`; go on after a moment, and leave the rest to a thread of its own.

    librdkafka waits for all of its threads, one of which may be looking up the name of a broker that is gone: as long
    as the resolver takes, where the name servers say nothing.
    """
    ending = threading.Thread(target=close, name="kafka-client-ends", daemon=True)
    try:
        ending.start()
    except RuntimeError:  # no thread can be started, at the limits of the process or at its end
        close()
    else:
        ending.join(_END_SECONDS)


def make_consumer(config: KafkaConfig) -> Consumer:
    """Make a consumer; raises as `make_producer` does."""
    consumer: Consumer = _make(Consumer, config)
    return consumer


def make_admin(config: KafkaConfig) -> AdminClient:
    """Make an admin client; raises as `make_producer` does."""
    admin: AdminClient = _make(AdminClient, config)
    return admin


def _make(client: Any, config: KafkaConfig) -> Any:
    settings = dict(config)
    guarded = {name: _Guarded(name, settings[name]) for name in _CALLBACKS if callable(settings.get(name))}
    settings.update(guarded)
    # Informational: librdkafka recovers, and each caller sees its own failures.
    settings.setdefault("error_cb", lambda error: _client_log.debug("librdkafka: %s", error))
    if client is AdminClient:
        settings.setdefault("log_level", _NOTICE)  # below, it writes a line to stderr when it is closed
    try:
        settings["logger"] = _GuardedLogger(settings.get("logger") or _DebugLogger(_client_log, {}))
        return client(settings)
    except KafkaException as error:
        raise _why_not_made(error.args[0], config, _because_of(guarded.get(_OAUTH))) from None
    except SystemError:  # of confluent-kafka, where a callback raises while the client is made
        raise KafkaUnavailable(f"a Kafka client cannot be made{_because_of(guarded.get(_OAUTH))}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ClientRefused(f"Kafka settings: {error}") from None


def _why_not_made(cause: KafkaError, config: KafkaConfig, token_failure: str) -> KafkaUnavailable:
    from outbox_core.config.redaction import without_values

    if cause.code() == KafkaError._CRIT_SYS_RESOURCE:  # noqa: SLF001  confluent's public constant
        return ClientExhausted(f"a Kafka client cannot be made: {cause.str()}; raise the process's limits")
    text = without_values(cause.str(), config)
    if cause.code() in _NO_TOKEN:
        return KafkaUnavailable(f"cannot log in to Kafka: {text}{token_failure}")
    return ClientRefused(f"Kafka settings: {text}{_suggestion(cause, config)}")


def _because_of(token: _Guarded | None) -> str:
    """Return what the callback for tokens has raised, to follow an error; "" if nothing."""
    from outbox_core.config.redaction import redact

    return f"; {_OAUTH} raised {redact(token.failure)}" if token is not None and token.failure else ""


class _Guarded:
    """A callback of the user's whose errors do not leave it, but for those by which the client knows: `oauth_cb`'s."""

    def __init__(self, name: str, callback: Callable[..., Any]) -> None:
        self.failure = ""  # of its last call, in one line
        self._name = name
        self._callback = callback

    def __call__(self, *args: Any) -> Any:
        try:
            result = self._callback(*args)
        except InvariantBroken:
            raise
        except Exception as error:
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
            log_once(_client_log, f"the Kafka client's {self._name} failed", error)
            if self._name == _OAUTH:
                raise  # then the client knows that it has no token, and asks for one again
            return None
        self.failure = ""
        return result


class _GuardedLogger:
    """A logger as the client uses it, whose errors do not leave it."""

    def __init__(self, logger: Any) -> None:
        self.log = _Guarded("logger", logger.log)


def _suggestion(error: KafkaError, config: KafkaConfig) -> str:
    """Return a property to use instead of one that librdkafka does not know; '' if none resembles it."""
    if error.code() != KafkaError._INVALID_ARG:  # noqa: SLF001  confluent's public constant
        return ""
    wrong = next((name for name in config if f'"{name}"' in error.str()), "")
    close = difflib.get_close_matches(wrong, _COMMON_PROPERTIES, 1, _LIKENESS)
    return f"; did you mean {close[0]}?" if close and close[0] != wrong else ""
