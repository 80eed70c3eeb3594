"""`outbox-spark pack`: the packages that tasks import, in one archive for the workers of a cluster.

Workers bring Python and Spark, with PySpark and Java; so neither is in the archive, nor what the driver alone imports.
The packages are copied as pip installed them here: driver and workers have the same versions.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from outbox_core.errors import InvalidConfig, MissingExtra

_OURS = ("outbox_core", "outbox_spark")
_DRIVER_ONLY = {"pyspark", "pandas"}
_CODE = {".py", ".html"}  # tasks are run by modules, of which one has a page beside it
_NOT_NEEDED = {"__pycache__", "include", "tests"}
_OF_REGISTRIES = {"avro", "protobuf", "schemaregistry"}  # extras of confluent-kafka
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)")


def main(path: str) -> int:
    """Write the archive, and tell what is in it; return the exit code. Raises MissingExtra or InvalidConfig."""
    target, count = Path(path), 0
    try:
        with tarfile.open(target, "w:gz", compresslevel=3) as archive:
            for source, name in _files():
                archive.add(source, name, recursive=False)
                count += 1
    except OSError as error:
        raise InvalidConfig(f"--output {target}: cannot be written: {error.strerror}") from None
    size, version = target.stat().st_size, ".".join(map(str, sys.version_info[:2]))
    sys.stdout.write(f"{target}: {count:,} files, {size / 1e6:.0f} MB, for Python {version}\n")
    return 0


def _files() -> Iterator[tuple[Path, str]]:
    """Yield each file and its name in the archive."""
    for package in _OURS:
        # By its folder: an editable install lists no files.
        (folder,) = importlib.util.find_spec(package).submodule_search_locations  # type: ignore[misc, union-attr]
        for file in Path(folder).rglob("*"):
            # Nothing else: a file of secrets may lie in a working copy.
            if file.suffix in _CODE and file.is_file() and not _NOT_NEEDED.intersection(file.parts):
                yield file, f"{package}/{file.relative_to(folder)}"
    for distribution in _distributions():
        for listed in distribution.files or ():
            if ".." not in listed.parts and not _NOT_NEEDED.intersection(listed.parts) and listed.suffix != ".pyi":
                yield Path(str(listed.locate())), str(listed)


def _distributions() -> Iterator[importlib.metadata.Distribution]:
    """Yield the distributions that a worker needs, each once; for values of a schema registry those that are here."""
    waiting, seen = list(_requirements("kafka-outbox", {"spark"})), set(_DRIVER_ONLY)
    waiting += [(name, extras, False) for name, extras, _ in _requirements("confluent-kafka", _OF_REGISTRIES)]
    while waiting:
        name, extras, is_certain = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            yield importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if not is_certain:  # it is for another platform, or another Python
                continue
            raise MissingExtra(f"{name} is not installed: pip install 'kafka-outbox[spark]'") from None
        waiting += _requirements(name, extras)


def _requirements(name: str, extras: set[str]) -> Iterator[tuple[str, set[str], bool]]:
    """Yield the requirements of a distribution with these extras: name, extras, and whether they hold everywhere."""
    for line in importlib.metadata.requires(name) or ():
        requirement, _, marker = line.partition(";")
        of_extras = set(_EXTRA.findall(marker))
        found = _REQUIREMENT.match(requirement)
        if found is not None and (not of_extras or of_extras & extras):
            wanted = {extra.strip() for extra in (found[2] or "").split(",") if extra.strip()}
            yield re.sub("[-_.]+", "-", found[1]).lower(), wanted, not _EXTRA.sub("", marker).strip(" '\"")
