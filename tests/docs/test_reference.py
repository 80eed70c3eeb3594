"""The reference pages name what exists, and everything that is public."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import outbox_core
import outbox_django
import outbox_queue
import outbox_sqlalchemy
from outbox_core.config import HarvestConfig, Limits
from outbox_core.config.names import yaml_name
from tests.docs.blocks import BLOCKS

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "reference-api.md").read_text()
ERRORS = (DOCS / "reference-errors.md").read_text()
DIRECTIVES = re.findall(r"^::: ([\w.]+)((?:\n {4}.*)*)", API + ERRORS, re.MULTILINE)


def _resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def _listed_members(options: str) -> list[str]:
    found = re.search(r"members: \[(.*)\]", options)
    return found[1].split(", ") if found else []


@pytest.mark.parametrize(("path", "options"), DIRECTIVES, ids=[path for path, _ in DIRECTIVES])
def test_names_of_the_reference_exist(path: str, options: str) -> None:
    """Each entry can be imported, has a docstring, and so have the members that it lists."""
    entry = _resolve(path)
    assert inspect.getdoc(entry)
    for member in _listed_members(options):
        assert inspect.getdoc(getattr(entry, member)), f"{path}.{member} has no docstring"


@pytest.mark.parametrize("package", [outbox_core, outbox_django, outbox_queue, outbox_sqlalchemy])
def test_public_names_are_in_the_reference(package: Any) -> None:
    """Each name that a package exports is an entry, or named in the text."""
    errors = {name for name in dir(importlib.import_module("outbox_core.errors")) if name[0].isupper()}
    public = {name for name in package.__all__ if not name.startswith("__")}
    assert sorted(public - _named() - errors) == []


def test_imports_of_other_pages_are_in_the_reference() -> None:
    """Each name that a code block imports from us is an entry, named in the text, or in a module that is an entry."""
    pages = "\n".join(block.text for block in BLOCKS)
    imports = re.findall(r"^ *from (outbox_[\w.]+) import ([\w, ]+\w)", pages, re.MULTILINE)
    assert len(imports) > 40
    known = _named() | {"tracing"}  # a module, whose functions are entries
    modules = {path for path, _ in DIRECTIVES}
    missing = {f"{module}.{name}" for module, names in imports for name in set(names.split(", ")) - known}
    assert sorted(path for path in missing if path.rpartition(".")[0] not in modules) == []


def _named() -> set[str]:
    entries = {path.rpartition(".")[2] for path, _ in DIRECTIVES}
    entries |= {member for _, options in DIRECTIVES for member in _listed_members(options)}
    return entries | set(re.findall(r"`(?:\w+\.)?(\w+)", API + ERRORS))


def _errors() -> dict[str, str]:
    """Return the module of each public error, read from the source: importing all of it would import PySpark."""
    classes: dict[str, tuple[str, set[str]]] = {}
    root = DOCS.parent
    for path in root.glob("outbox_*/**/*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = module, {ast.unparse(base) for base in node.bases}
    found = {"OutboxError"}
    while more := {name for name, (_, bases) in classes.items() if bases & found} - found:
        found |= more
    return {name: classes[name][0] for name in found if not name.startswith("_")}


def test_every_error_is_in_the_reference() -> None:
    """Errors of modules that the page shows as a whole, or a line for the error."""
    whole = {path for path, options in DIRECTIVES if path.endswith(".errors")}
    errors = _errors()
    assert len(errors) > 20
    missing = [name for name, module in errors.items() if module not in whole and f"`{name}`" not in ERRORS]
    assert sorted(f"{errors[name]}.{name}" for name in missing) == []


@pytest.mark.parametrize("model", [HarvestConfig, Limits])
def test_every_setting_is_in_the_configuration_page(model: Any) -> None:
    """A row for each setting, with its names in YAML and Python."""
    page = (DOCS / "configuration.md").read_text()
    named = set(re.findall(r"`([\w.]+)`", page))
    missing = [name for name in model.model_fields if not {name, yaml_name(name)} <= named and name != "limits"]
    assert missing == []
