"""Parameters of requests, checked: each error says which one is wrong, and what is expected."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from outbox_core.console.messages import LONGEST_BODY_BYTES, ApiError, Request, bad_parameter

_BIGINTS = range(-(2**63), 2**63)
_MOST_PARAMETERS = 30
_LONGEST_TEXT = 70_000  # a key of 64 KiB


class Fields:
    """Named values of a query or of a JSON object. Each is taken once; `finish` refuses what nobody has taken.

    Methods raise ApiError, naming the value.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._taken: set[str] = set()

    @classmethod
    def of_query(cls, query: str) -> Fields:
        """Return the parameters behind `?`; empty ones count as not given."""
        try:
            pairs = parse_qsl(query, errors="strict", max_num_fields=_MOST_PARAMETERS)
        except ValueError as error:
            raise bad_parameter("query", f"cannot be read: {error}") from None
        values = dict(pairs)
        if len(values) < len(pairs):
            raise bad_parameter("query", "a parameter is given twice")
        return cls(values, "query")

    @classmethod
    def of_body(cls, request: Request) -> Fields:
        """Return the members of the JSON object that a POST has as its body."""
        if len(request.body) > LONGEST_BODY_BYTES:
            raise ApiError(413, "too_large", f"the body is longer than {LONGEST_BODY_BYTES} bytes", where="body")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "not_json", "send the header Content-Type: application/json", where="body")
        try:
            document = json.loads(request.body)
        except (ValueError, RecursionError):
            raise ApiError(415, "not_json", "the body is no JSON", where="body") from None
        if not isinstance(document, dict):
            raise ApiError(415, "not_json", "the body is no JSON object", where="body")
        return cls(document, "body")

    def place(self, name: str) -> str:
        """Return the name as errors say it: `body.select.records`."""
        return f"{self._where}.{name}"

    def given(self, name: str) -> Any:
        """Return a value as it is, None if it is not given."""
        self._taken.add(name)
        return self._values.get(name)

    def text(self, name: str, *, most: int = _LONGEST_TEXT) -> str | None:
        """Return a text of at most so many characters, None if it is not given."""
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise bad_parameter(self.place(name), f"expected a text, got {_shown(value)}")
        if len(value) > most:
            raise bad_parameter(self.place(name), f"has {len(value):,} characters, at most {most:,} are allowed")
        if "\0" in value:
            raise bad_parameter(self.place(name), "contains a NUL character, which PostgreSQL's texts cannot")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad_parameter(self.place(name), "contains half a character, which UTF-8 cannot express") from None
        return value

    def required(self, name: str, *, most: int = _LONGEST_TEXT) -> str:
        """Return a text that has to be given, and not to be blank."""
        value = self.text(name, most=most)
        if value is None or not value.strip():
            raise bad_parameter(self.place(name), "is needed")
        return value

    def number(self, name: str, default: float, lowest: float, highest: float) -> float:
        """Return a number within bounds."""
        value = self.given(name)
        if value is None:
            return default
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or not lowest <= number <= highest:
            expected = f"expected a number from {lowest:g} to {highest:g}, got {_shown(value)}"
            raise bad_parameter(self.place(name), expected)
        return number

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        """Return a whole number within bounds."""
        value = self.bigint(name)
        if value is None:
            return default
        if not lowest <= value <= highest:
            raise bad_parameter(self.place(name), f"expected a whole number from {lowest} to {highest}, got {value}")
        return value

    def bigint(self, name: str) -> int | None:
        """Return a whole number of 64 bits, given as text or number, None if it is not given."""
        value = self.given(name)
        return None if value is None else bigint(value, self.place(name))

    def bigints(self, name: str, *, most: int) -> list[int] | None:
        """Return a list of whole numbers, None if it is not given."""
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, list) or not 0 < len(value) <= most:
            raise bad_parameter(self.place(name), f"expected a list of 1 to {most:,} ids")
        return [bigint(one, f"{self.place(name)}[{place}]") for place, one in enumerate(value)]

    def flag(self, name: str) -> bool:
        """Return a truth value, False if it is not given; in a query 1, 0, true or false."""
        value = self.given(name)
        known = {None: False, "1": True, "true": True, "0": False, "false": False}
        if isinstance(value, bool):
            return value
        if not isinstance(value, str | None) or value not in known:
            raise bad_parameter(self.place(name), f"expected true or false, got {_shown(value)}")
        return known[value]

    def choice(self, name: str, choices: Iterable[str]) -> str | None:
        """Return one of these texts, None if it is not given."""
        value = self.text(name)
        known = list(choices)
        if value is not None and value not in known:
            raise bad_parameter(self.place(name), f"expected one of {', '.join(known)}, got {_shown(value)}")
        return value

    def fields(self, name: str) -> Fields | None:
        """Return a JSON object within this one, None if it is not given."""
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad_parameter(self.place(name), f"expected a JSON object, got {_shown(value)}")
        return Fields(value, self.place(name))

    def refuse_null(self) -> None:
        """Refuse members that are null: what a program does not know must not widen an action."""
        for name, value in self._values.items():
            if value is None:
                raise bad_parameter(f"{self._where}.{name[:100]}", "is null; leave it out, if it may be anything")

    def finish(self) -> None:
        """Refuse values that nobody has asked for: a typing error must not widen an action."""
        for name in self._values:
            if name not in self._taken:
                raise bad_parameter(f"{self._where}.{name[:100]}", f"is not known here; there are {self._names()}")

    def _names(self) -> str:
        return ", ".join(sorted(self._taken)) or "none"


def bigint(value: Any, where: str) -> int:
    """Return a whole number of 64 bits, given as text or number."""
    number = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.isascii() and len(value) <= 20 and value.removeprefix("-").isdigit():
        number = int(value)
    if number is None or number not in _BIGINTS:
        raise bad_parameter(where, f"expected a whole number, got {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    return ascii(value)[:100]
