"""Fields of PostgreSQL's types: an array without `django.contrib.postgres`, and columns that any writer may fill."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Literal

from django.db import models

from outbox_core.schema import shown_key_sql

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

    ArrayBase = models.Field["list[Any]", "list[Any]"]
    TimeBase = models.DateTimeField[Any, Any]
    TextBase = models.TextField[Any, Any]
else:
    ArrayBase, TimeBase, TextBase = models.Field, models.DateTimeField, models.TextField


class PostgresArrayField(ArrayBase):
    """A one-dimensional array of `text` or `bytea`, read and written as a list."""

    description = "Array of %(element)s"
    empty_strings_allowed = False

    def __init__(self, *args: Any, element: Literal["text", "bytea"], **kwargs: Any) -> None:
        self.element = element
        super().__init__(*args, **kwargs)

    def db_type(self, connection: BaseDatabaseWrapper) -> str:
        """Return the column's type."""
        del connection
        return f"{self.element}[]"

    def deconstruct(self) -> tuple[str, str, list[Any], dict[str, Any]]:
        """Return the field as a migration writes it."""
        name, path, args, kwargs = super().deconstruct()
        return name, path, list(args), {**kwargs, "element": self.element}

    def value_to_string(self, obj: models.Model) -> str:
        """Return the value as a fixture has it: JSON, with bytes in base64."""
        values = self.value_from_object(obj)
        return json.dumps([value if isinstance(value, str | None) else b64encode(value).decode() for value in values])

    def to_python(self, value: Any) -> Any:
        """Return the value of a fixture as a list."""
        if not isinstance(value, str):
            return value
        decode = b64decode if self.element == "bytea" else str
        return [None if item is None else decode(item) for item in json.loads(value)]


class TimeField(TimeBase):
    """A time that is read as None where Python has none for it: infinity, or a year that a writer made up."""

    def deconstruct(self) -> tuple[str, str, list[Any], dict[str, Any]]:
        """Return the field as a migration writes it: the column is that of any time."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", list(args), kwargs

    def select_format(self, compiler: SQLCompiler, sql: str, params: Any) -> tuple[str, Any]:
        """Return the column as it is selected."""
        del compiler
        is_python_s = f"{sql} >= '0001-01-02' AND {sql} < '9999-12-31'"
        return f"CASE WHEN {is_python_s} THEN {sql} END", [*params] * 3


class KeyField(TextBase):
    """A key, of which no more is read than a stash allows: a writer may have made up one of a gigabyte."""

    def deconstruct(self) -> tuple[str, str, list[Any], dict[str, Any]]:
        """Return the field as a migration writes it: the column is that of any text."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.TextField", list(args), kwargs

    def select_format(self, compiler: SQLCompiler, sql: str, params: Any) -> tuple[str, Any]:
        """Return the column as it is selected."""
        del compiler
        return shown_key_sql(sql), params
