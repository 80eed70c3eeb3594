"""Validation errors in the words of the settings' author, without the values: a value may be a password."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from outbox_core.config.names import Path
from outbox_core.config.redaction import redact
from outbox_core.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Problem(NamedTuple):
    """A fault of one setting."""

    path: Path
    message: str


class InvalidSettings(InvalidConfig):
    """One or more settings that are unknown, missing or out of range, all of them named."""

    shows_no_values = True

    def __init__(self, problems: Sequence[Problem], name_of: Callable[[Path], str] = ".".join) -> None:
        self.problems = tuple(problems)
        super().__init__(*(_sentence(name_of(path), message) for path, message in self.problems))


class Settings(BaseModel):
    """Frozen settings that raise `InvalidConfig`, in Python names or in goharvest's."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidSettings(list(_problems(error, type(self)))) from None

    @classmethod
    def names(cls) -> dict[str, str]:
        """Return every field's Python name, with its name in YAML."""
        return {name: str(field.validation_alias or name) for name, field in cls.model_fields.items()}


def _problems(error: ValidationError, model: type[Settings]) -> Iterable[Problem]:
    for detail in error.errors(include_url=False, include_input=False):
        path = _python_path(tuple(str(part) for part in detail["loc"]), model)
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, InvalidSettings):  # a nested model, or a validator that found several
            yield from (Problem(path + problem.path, problem.message) for problem in cause.problems)
        elif detail["type"] == "extra_forbidden":
            yield Problem(path, unknown_field(path[-1], model.names()))
        else:
            yield Problem(path, _in_words(detail["type"], detail.get("ctx", {})) or redact(str(cause or detail["msg"])))


def _python_path(path: Path, model: type[Settings]) -> Path:
    """Return the path with the field's Python name, for either of its names."""
    python_names = {yaml: name for name, yaml in model.names().items()}
    return tuple(python_names.get(part, part) for part in path[:1]) + path[1:]


def unknown_field(name: str, known: dict[str, str]) -> str:
    """Return the message for a setting that does not exist, with a suggestion in the same notation."""
    candidates = list(known) if "_" in name else list(known.values())
    folded = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return "unknown field" + (f"; did you mean {folded[close[0]]}?" if close else "")


def _in_words(kind: str, context: dict[str, Any]) -> str | None:
    """Return the message for a kind of mistake; None for one that pydantic, or a validator of ours, words."""
    pattern = _WORDS.get(kind)
    return pattern.format(**context) if pattern is not None else None


_WORDS = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "string_too_short": "must not be empty",
    "string_type": "must be text; put it in quotes",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "byte_size": "must be a size, such as 128 MiB",
    "byte_size_unit": "must be a size, such as 128 MiB",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


def _sentence(name: str, message: str) -> str:
    return f"{redact(name)}: {message}" if name else message
