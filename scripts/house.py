"""Numbers about the product's source. `make house` prints them, and fails only for what no trim of lines could hide."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("outbox_core", "outbox_sqlalchemy", "outbox_django", "outbox_queue", "outbox_spark")
GENERATED = "_pb2.py"
QUESTION_WORDS = {"what", "whether", "how", "who", "whose", "which", "where", "when", "why"}

MANY_ATTRIBUTES = 12
LONGEST_FUNCTION = 41
LOOPS = ("harvest", "stores", "kafka", "election")  # with what they stand on: what a reader of a loop has to know
# None: printed alone. A limit on a count of lines would be kept by cutting the comments that a reader needs.
LIMITS: dict[str, int | None] = {
    f"lines of {', '.join(LOOPS)}": None,
    "modules in the largest folder": None,
    f"classes with {MANY_ATTRIBUTES} or more attributes": None,
    "docstrings that begin with a question word, per cent": 3,
    f"functions of more than {LONGEST_FUNCTION} lines of code": None,
    "imports of outbox_core.harvest from outside its room and outbox_core.cli": 0,
    "import cycles": 0,
}


class Module(NamedTuple):
    """A source file: its dotted name, its path, its text and its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module


def modules(root: Path) -> list[Module]:
    """Read all modules of the product but generated ones."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if not path.name.endswith(GENERATED):
                text = path.read_text()
                name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                found.append(Module(name, path.relative_to(root), text, ast.parse(text)))
    return found


def largest_folders(source: list[Module]) -> Counter[str]:
    """Count the modules of each folder, `__init__.py` and `__main__.py` not among them."""
    return Counter(str(module.path.parent) for module in source if not module.path.name.startswith("__"))


def attributes(source: list[Module]) -> dict[str, int]:
    """Count the attributes that each class's methods assign to `self`."""
    counts = {}
    for module in source:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                assigned = {inner.attr for inner in ast.walk(node) if _is_own_attribute(inner)}
                counts[f"{module.path}: {node.name}"] = len(assigned)
    return counts


def _is_own_attribute(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def docstrings(source: list[Module]) -> Iterator[tuple[str, str]]:
    """Yield every docstring with its place."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module in source:
        for node in ast.walk(module.tree):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield f"{module.path}:{getattr(node, 'lineno', 1)}", text


def question(docstring: str) -> bool:
    """Tell whether a docstring begins with a question word."""
    first = docstring.split(maxsplit=1)[0].strip("`*'\".,:;").lower()
    return first in QUESTION_WORDS


def long_functions(source: list[Module]) -> dict[str, int]:
    """Count the lines of code of functions that have too many: blank lines, comments and docstrings do not count."""
    found = {}
    for module in source:
        lines = module.text.splitlines()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                skipped = len((ast.get_docstring(node, clean=False) or "").splitlines())
                body = lines[node.lineno - 1 : node.end_lineno]
                code = sum(1 for line in body if line.strip() and not line.strip().startswith("#")) - skipped
                if code > LONGEST_FUNCTION:
                    found[f"{module.path}:{node.lineno} {node.name}"] = code
    return found


def imports(source: list[Module], *, at_module_level: bool) -> dict[str, set[str]]:
    """Map each module to the product's modules that it imports; those for type checkers alone do not count."""
    known = {module.name for module in source}
    found: dict[str, set[str]] = {}
    for module in source:
        nodes = _statements(module.tree) if at_module_level else ast.walk(module.tree)
        targets: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets.add(inner if inner in known else node.module)
        found[module.name] = targets & known - {module.name}
    return found


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, without the blocks for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if isinstance(node, ast.Try | ast.If):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.stmt))


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Find the strongly connected groups of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def outside_imports(source: list[Module]) -> list[str]:
    """List the modules outside of the harvester's folder and the commands that import it."""
    inside = ("outbox_core.harvest", "outbox_core.cli")
    return [
        name
        for name, targets in imports(source, at_module_level=False).items()
        if not name.startswith(inside) and any(target.startswith("outbox_core.harvest") for target in targets)
    ]


def _lines(source: list[Module], prefix: str) -> int:
    return sum(module.text.count("\n") for module in source if module.name.startswith(prefix))


def main() -> int:
    """Print each number, beside its limit where it has one, and what is beyond it."""
    source = modules(Path(__file__).resolve().parents[1])
    folders, texts, long = largest_folders(source), list(docstrings(source)), long_functions(source)
    crowded = {name: count for name, count in attributes(source).items() if count >= MANY_ATTRIBUTES}
    questions = [place for place, text in texts if question(text)]
    circles, outside = cycles(imports(source, at_module_level=True)), outside_imports(source)
    largest = dict(folders.most_common(1))
    lines = {loop: _lines(source, f"outbox_core.{loop}.") for loop in LOOPS}
    measured: list[tuple[float, object]] = [
        (sum(lines.values()), lines),
        (max(largest.values()), largest),
        (len(crowded), dict(sorted(crowded.items(), key=lambda item: -item[1]))),
        (round(100 * len(questions) / len(texts), 1), questions),
        (len(long), long),
        (len(outside), outside),
        (len(circles), circles),
    ]
    failed = False
    for (name, limit), (value, evidence) in zip(LIMITS.items(), measured, strict=True):
        beyond = limit is not None and value > limit
        failed |= beyond
        allowed = "" if limit is None else f"  (at most {limit:,})"
        print(f"{name:<75} {value:>9,}{allowed}" + ("  <-- beyond" if beyond else ""))
        if beyond and evidence:
            entries = evidence.items() if isinstance(evidence, dict) else evidence
            print("".join(f"    {entry}\n" for entry in entries), end="")
    print(f"{'lines of all packages':<75} {_lines(source, ''):>9,}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
