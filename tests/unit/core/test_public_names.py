"""The names that the packages export."""

import importlib
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
PACKAGES = ("outbox_core", "outbox_sqlalchemy", "outbox_django", "outbox_queue")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_public_names_alone(package):
    """`dir()` of a package, and so an interpreter's completion, has what `__all__` has, and no modules."""
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    assert not [name for name in module.__all__ if type(getattr(module, name)) is type(importlib)]


def test_what_the_pages_import_is_public():
    """Every module that the documentation imports from names what it exports, and exports what is imported."""
    pages = "\n".join(page.read_text() for page in [*CHECKOUT.glob("docs/*.md"), CHECKOUT / "README.md"])
    imports = re.findall(r"^ *from (outbox_[a-z_.]+) import ([\w, ]+)", pages, re.MULTILINE)
    assert len(imports) > 30
    for name, imported in imports:
        module = importlib.import_module(name)
        assert all(hasattr(module, public) for public in module.__all__), name
        for part in imported.split(","):
            is_public_module = hasattr(getattr(module, part.strip()), "__all__")
            assert part.strip() in module.__all__ or is_public_module, f"{name}.{part.strip()}"


@pytest.mark.parametrize(
    "package", [*PACKAGES, "outbox_core.testing", "outbox_core.schema", "outbox_sqlalchemy.alembic"]
)
def test_public_names_are_explained(package):
    """Everything that can be called has a docstring, which editors show, and so have the methods of classes."""
    module = importlib.import_module(package)
    called = {name: value for name in module.__all__ if callable(value := getattr(module, name))}
    for name, value in tuple(called.items()):
        if isinstance(value, type) and value.__module__.startswith("outbox_"):
            called |= {
                f"{name}.{method}": member
                for method, member in vars(value).items()
                if callable(member) and not method.startswith("_")
            }
    assert not [name for name, value in called.items() if not (value.__doc__ or "").strip()]
