"""Text, bytes and whole numbers of callers, whose types may be their own.

A subclass has what methods it likes. An Enum of texts is its name to `str()`, to f-strings on some versions of Python
and to some drivers, and its value to others; `in range(...)` walks through all numbers for a subclass of int. So what
callers hand us becomes Python's own before it is compared, formatted, measured or stored: in the constructors of
records and events, and where ids, names and reasons are checked.
"""

from __future__ import annotations

from typing import Any

from outbox_core.errors import InvalidConfig

_OWN = frozenset({str, bytes, int, bool, type(None)})


def plain(value: Any) -> Any:
    """Return text, bytes or a whole number as Python's own type, and anything else as it is.

    Text is also what is lazy (Django's `gettext_lazy`), or stands for text (a proxy, such as Django's
    `SimpleLazyObject`). Bytes are also `bytearray` and `memoryview`; whole numbers are also those of other libraries,
    such as NumPy, that may be an index. A `bool` stays one.
    """
    kind = type(value)
    if kind in _OWN:
        return value
    if isinstance(value, str) or kind.__name__ == "__proxy__":  # the latter of Django's `lazy`
        return str.__str__(value if issubclass(kind, str) else str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(memoryview(value) if issubclass(kind, bytes) else value)
    if isinstance(value, int) or hasattr(kind, "__index__"):
        return _whole(value)
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, bool):  # of a proxy
        return value
    try:
        return int.__index__(value if issubclass(type(value), int) else value.__index__())
    except TypeError:  # an array, or a truth value of another library
        return value


def named(text: object, what: str) -> str:
    """Return a name as `column_text` does; InvalidConfig also if there is none, or it is no text."""
    text = plain(text)
    if not isinstance(text, str) or not text:
        raise InvalidConfig(f"{what}: expected a name, got {text!r:.100}")
    return column_text(text, what) or ""


def column_text(text: object, what: str) -> str | None:
    """Return text for a text column, a `key` of bytes as the UTF-8 that it is in Kafka; None stays None.

    Raises:
        InvalidConfig: if it is none, or a text column cannot hold it.
    """
    text = plain(text)
    if text is None:
        return None
    if isinstance(text, bytes) and what == "key":
        try:
            text = text.decode()
        except UnicodeDecodeError:
            raise InvalidConfig("key: bytes that are not UTF-8 cannot be in the text column kafka_key") from None
    if not isinstance(text, str):
        raise InvalidConfig(f"{what}: expected str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidConfig(f"{what}: cannot be encoded as UTF-8 ({error.reason} at {error.start})") from None
    if "\0" in text:
        raise InvalidConfig(f"{what}: contains a NUL character, which a text column cannot hold")
    return text
