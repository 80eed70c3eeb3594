"""YAML, read as strictly as goharvest does, and not quoted in errors: it holds passwords."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from outbox_core.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                problem = "a list or mapping stands where a name should be; is this a `{{ }}` that was not filled in?"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> Any:
    """Return the content of the file, `{}` if it is empty; errors name the file, line and column."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfig(f"{path}: is not UTF-8 text") from None
    try:
        content = yaml.load(text, Loader=_StrictLoader)  # noqa: S506  derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InvalidConfig(f"{path}{where}: is not valid YAML: {error.problem}") from None
    except yaml.YAMLError:
        raise InvalidConfig(f"{path}: is not valid YAML: contains characters that YAML does not allow") from None
    return {} if content is None else content
