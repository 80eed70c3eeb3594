"""Calling a serializer: any callable from a value to bytes or text, or one of confluent-kafka for a schema registry."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outbox_core.errors import SerializationFailed
from outbox_core.plain import plain

Serializer = Callable[..., Any]
"""A function of a value that returns `bytes` or `str`; or an instance of `confluent_kafka.serialization.Serializer`."""

HeaderPairs = Sequence[tuple[str, bytes | str | None]]

_CONFLUENT = "confluent_kafka.serialization"


class Serialized(NamedTuple):
    """A serialized value, and the headers with those that the serializer has added."""

    value: bytes | str
    headers: HeaderPairs


def serialize(serializer: Serializer, value: object, topic: str, headers: HeaderPairs) -> Serialized:
    """Serialize a record's value.

    Serializers of confluent-kafka get a context with the topic, the field `value` and the headers, which they may add
    to: the id of a schema can stand there.

    Raises:
        SerializationFailed: naming topic, field and cause, whatever the serializer raised, and if it returned neither
            bytes nor text.
    """
    where = f"value: for topic {topic!r} {_name(serializer)} cannot serialize a {type(value).__name__}"
    pairs = list(headers)
    try:
        confluent = _confluent_module(serializer)
        if confluent is None:
            result = serializer(value)
        else:
            field = confluent.MessageField.VALUE
            result = serializer(value, confluent.SerializationContext(topic, field, pairs))
    except Exception as error:
        cause = str(error) or "no reason given"
        raise SerializationFailed(f"{where}: {type(error).__name__}: {cause}") from error
    result = plain(result)
    if isinstance(result, bytes | str):
        return Serialized(result, pairs)
    if inspect.iscoroutine(result):
        result.close()  # it is not warned of as never awaited
        raise SerializationFailed(f"{where}: it is asynchronous; use its synchronous twin")
    raise SerializationFailed(f"{where}: it returned {type(result).__name__} instead of bytes or str")


def _confluent_module(serializer: Serializer) -> Any:
    """Return confluent-kafka's module if the serializer is one of its own, whose calls need a context.

    There is none of its own before the module is imported, so that this needs no import.
    """
    module = sys.modules.get(_CONFLUENT)
    return module if module is not None and isinstance(serializer, module.Serializer) else None


def _name(serializer: Serializer) -> str:
    named = serializer if hasattr(serializer, "__qualname__") else type(serializer)
    return f"the serializer {named.__qualname__}"
