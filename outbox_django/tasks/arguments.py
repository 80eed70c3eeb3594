"""Arguments of tasks travel as JSON: they are refused when they would not arrive as they were given.

`checked_arguments` looks at the values of one call, before anything is written. `foreign_parameters` looks at a task's
annotations, for the system check.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outbox_django.tasks.library import Task, normalize_json

_SCALARS = (str, int, float, types.NoneType)
_CONTAINERS = (list, tuple, dict)
_REMEDY = "pass text, numbers, lists or dicts with keys of text, for example an object's primary key"


def checked_arguments(
    task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, for_table: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as JSON has them, `for_table`: as PostgreSQL's jsonb has them.

    Raises:
        TypeError: naming task and argument, if the task does not take these arguments, or one is not JSON.
    """
    context = (None,) if task.takes_context else ()
    try:
        bound = inspect.signature(task.func).bind(*context, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"task {task.module_path}: {error}") from None
    for name, value in bound.arguments.items():
        if context and value is None and name == next(iter(bound.arguments)):
            continue
        if problem := _problem(value) or (for_table and _problem_of_table(value)):
            raise TypeError(f"task {task.module_path}: argument {name!r}: {problem}; {_REMEDY}")
    return [normalize_json(value) for value in args], {name: normalize_json(value) for name, value in kwargs.items()}


def _problem(value: object) -> str | None:
    try:
        normal = normalize_json(value)
        encoded = json.dumps(normal, allow_nan=False)
    except RecursionError:
        return "it contains itself, or is nested too deeply for JSON"
    except (TypeError, ValueError) as error:
        return f"not JSON: {error}"
    return None if json.loads(encoded) == normal else "JSON would change it: keys of a dict must be text"


def _problem_of_table(value: object) -> str | None:
    """Return what jsonb refuses of JSON: the statement would fail, and the caller's transaction with it."""
    for text in _texts(normalize_json(value)):
        if "\0" in text or text != text.encode(errors="replace").decode():
            return "the table of results can keep no NUL, and nothing that UTF-8 lacks"
    return None


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def foreign_parameters(task: Task[..., Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, annotation) of each parameter whose annotation names a type that JSON does not have."""
    function = task.func
    try:
        hints = get_type_hints(function)
    except Exception:  # a name that exists for type checkers only
        return
    for number, name in enumerate(inspect.signature(function).parameters):
        is_context = task.takes_context and number == 0
        if name in hints and not is_context and not _is_json(hints[name]):
            yield name, inspect.formatannotation(hints[name])


def _is_json(annotation: Any) -> bool:
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
    origin = get_origin(annotation)
    kind = origin or annotation
    if origin is Literal:
        return all(_is_json(type(value)) for value in get_args(annotation))
    if origin in (Union, types.UnionType) or (isinstance(kind, type) and issubclass(kind, _CONTAINERS)):
        return all(_is_json(member) for member in get_args(annotation) if member is not ...)
    if annotation is Any or not isinstance(kind, type):
        return True  # or a TypeVar, or a form that this check does not know
    return issubclass(kind, _SCALARS) or any(issubclass(known, kind) for known in (*_SCALARS, *_CONTAINERS))
