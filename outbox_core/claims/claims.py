"""Names of payloads, the header that carries them, and what a store has to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import NamedTuple, Protocol
from uuid import uuid4

from outbox_core.errors import InvalidConfig, OutboxError
from outbox_core.plain import plain

CLAIM_HEADER = "outbox-claim"
"""The header with the name of a record's payload; the record's value is empty then."""

_NAME = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,249})/(?P<time>[0-9]{8}T[0-9]{6}Z)-[0-9a-f]{32}")
_TIME = "%Y%m%dT%H%M%SZ"


class ClaimStoreFailed(OutboxError):
    """A store of payloads could not write or read one; its error is the cause."""


class ClaimMissing(ClaimStoreFailed):
    """A record names a payload that its store does not have, or the reader was given no store."""


class ClaimStore(Protocol):
    """A store of payloads. Any thread may use it. Names have a topic, a slash, and letters, digits and hyphens."""

    def put(self, name: str, payload: bytes) -> None:
        """Write a payload under a new name. It must survive any crash from the moment when this returns."""

    def get(self, name: str) -> bytes:
        """Return a payload; raise `ClaimMissing` if there is none of that name."""

    def names(self) -> Iterable[str]:
        """Return the names of all payloads, in any order; other names are ignored."""

    def delete(self, name: str) -> None:
        """Delete a payload; do nothing if there is none of that name."""


class ClaimName(NamedTuple):
    """The parts of a payload's name."""

    topic: str
    written_at: datetime

    @classmethod
    def parse(cls, name: str) -> ClaimName | None:
        """Read a name; None if it is none of ours, which could lead out of the store."""
        match = _NAME.fullmatch(name)
        if match is None or match["topic"] in (".", ".."):
            return None
        try:
            return cls(match["topic"], datetime.strptime(match["time"], _TIME).replace(tzinfo=UTC))
        except ValueError:
            return None


class ClaimCheck:
    """A store, and the size from which payloads go there. Immutable; any thread may use it.

    Args:
        store: where the payloads go.
        above: the most bytes that a value may have in its record.

    Raises:
        InvalidConfig: if `above` is no whole number of at least 0, or the store lacks a method.
    """

    __slots__ = ("above", "store")

    def __init__(self, store: ClaimStore, above: int) -> None:
        above = plain(above)
        if isinstance(above, bool) or not isinstance(above, int) or above < 0:
            raise InvalidConfig(f"claim_check_above: expected a number of bytes, 0 or more, got {above!r}")
        if not all(callable(getattr(store, method, None)) for method in ("put", "get", "names", "delete")):
            raise InvalidConfig(f"claim_store: {type(store).__name__} has not all methods of a ClaimStore")
        self.above = above
        self.store = store

    @classmethod
    def of(cls, store: ClaimStore | None, above: int | None) -> ClaimCheck | None:
        """Return the claim check of two options; None without both, InvalidConfig for one without the other."""
        if store is None and above is None:
            return None
        if store is None or above is None:
            raise InvalidConfig("claim_check_above, claim_store: give both, or neither")
        return cls(store, above)

    def deposit(
        self, topic: str, value: bytes | str | None, put: Callable[[str, bytes], object] | None = None
    ) -> str | None:
        """Write a value that is too large for its record to the store; return its name, None if it is small enough.

        `put` writes it in the place of the store's own method.

        Raises:
            ClaimStoreFailed: if the store did not take it; nothing refers to it then.
        """
        if value is None or len(value) * (4 if isinstance(value, str) else 1) <= self.above:
            return None
        payload = value.encode() if isinstance(value, str) else value
        if len(payload) <= self.above:
            return None
        name = f"{topic}/{datetime.now(UTC).strftime(_TIME)}-{uuid4().hex}"
        try:
            (put or self.store.put)(name, payload)
        except Exception as error:
            raise ClaimStoreFailed(
                f"value: {len(payload)} bytes for topic {topic!r} could not be written to "
                f"{type(self.store).__name__}: {type(error).__name__}: {error}"
            ) from error
        return name

    def withdraw(self, name: str) -> None:
        """Delete a payload whose record was not written; else it is an orphan."""
        with suppress(Exception):
            self.store.delete(name)


def claim_of(headers: Iterable[tuple[str, bytes | str | None]] | None, value: bytes | None) -> str | None:
    """Return the name of the payload that a record's headers name; None for a record that has its value itself."""
    if value != b"":
        return None  # a value of its own: the header, if there is one, came with headers that were forwarded
    named = [content for name, content in headers or () if name == CLAIM_HEADER and content]
    if not named:
        return None
    last = named[-1]
    return last.decode(errors="replace") if isinstance(last, bytes) else last


def collect(store: ClaimStore | None, name: str) -> bytes:
    """Return the payload of that name.

    Raises:
        ClaimMissing: if there is none, there is no store, or it is no name that a stash has made.
        ClaimStoreFailed: if the store failed otherwise.
    """
    if store is None:
        raise ClaimMissing(f"the payload is in a claim store, under {name!r:.400}; pass the store (`claim_store`)")
    if ClaimName.parse(name) is None:
        raise ClaimMissing(f"header {CLAIM_HEADER}: {name!r:.400} is no name of a payload")
    try:
        return store.get(name)
    except ClaimMissing:
        raise
    except Exception as error:
        raise ClaimStoreFailed(
            f"payload {name} could not be read from {type(store).__name__}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def store_errors(store: ClaimStore, what: str) -> Iterator[None]:
    """Turn what a store raises into ClaimStoreFailed."""
    try:
        yield
    except Exception as error:
        raise ClaimStoreFailed(f"{what} in {type(store).__name__}: {type(error).__name__}: {error}") from error


def written_before(store: ClaimStore, before: datetime) -> Iterator[tuple[str, ClaimName]]:
    """Yield the payloads that were written before a time, by the clocks of their writers."""
    with store_errors(store, "payloads could not be listed"):
        names = list(store.names())
    for name in names:
        parsed = ClaimName.parse(name)
        if parsed is not None and parsed.written_at < before:
            yield name, parsed
