"""A Postgres array without `django.contrib.postgres`, which asks for a place in INSTALLED_APPS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from django.db import models

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    ArrayBase = models.Field["list[Any]", "list[Any]"]
else:
    ArrayBase = models.Field


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
