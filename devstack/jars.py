"""Kafka's jars, resolved once into a cache folder, and compared with pinned hashes.

The folder is `$OUTBOX_DEVSTACK_CACHE`, else `~/.cache/kafka-outbox`. A file lock lets parallel starts wait for the one
that downloads, and the jars appear in the cache by a rename, so a folder that exists is complete. Two resolvers are
tried: Maven, where it is installed; else Apache Ivy, whose jar lies inside PySpark.

`jars.sha256` beside this file pins the jars of both. A jar that is not listed there, or is another one, is never
started: neither when it was just resolved, nor when it is found in the cache.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from devstack.errors import BrokerUnavailableError, DevstackError
from devstack.processes import run_watched
from devstack.truststore import java_trust_options

KAFKA_VERSION = "4.3.1"
_DEPENDENCIES = [
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.slf4j", "slf4j-simple", "1.7.36"),  # without a binding a failed start says nothing
]
_PINNED = Path(__file__).with_name("jars.sha256")
_PYSPARK_SDIST = "pyspark==4.0.5"
Report = Callable[[str], None]


def cache_directory() -> Path:
    """Return the folder for all downloads."""
    configured = os.environ.get("OUTBOX_DEVSTACK_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "kafka-outbox"


def kafka_jars(java: Path, report: Report) -> Path:
    """Return the folder with Kafka's jars, downloading them if need be.

    Raises:
        BrokerUnavailableError: No resolver could get them; the message has the error of each one.
    """
    cache = cache_directory().absolute()
    jars = cache / f"kafka-{KAFKA_VERSION}"
    if not jars.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock(cache / ".lock", report):
                if not jars.is_dir():
                    _resolve_into(jars, java, report)
        except OSError as error:
            raise BrokerUnavailableError(f"cannot write Kafka's jars to {cache}: {error}") from error
    _check_once(jars)
    return jars


def check_hashes(folder: Path) -> None:
    """Compare all jars of a folder with the pinned hashes.

    Raises:
        DevstackError: One is not listed, or is another one; the message names it.
    """
    pinned = pinned_hashes()
    for jar in sorted(folder.iterdir()):
        wanted = pinned.get(jar.name)
        found = hashlib.sha256(jar.read_bytes()).hexdigest()
        if found != wanted:
            problem = "is not listed" if wanted is None else f"has the SHA-256 {found}, not {wanted}"
            raise DevstackError(f"{jar} {problem} in {_PINNED}; remove {folder}, or pin what you have checked yourself")


def pinned_hashes() -> dict[str, str]:
    """Return SHA-256 by the name of the jar."""
    lines = (line.split() for line in _PINNED.read_text().splitlines())
    return {name: digest for digest, name in lines}


@functools.cache
def _check_once(jars: Path) -> None:
    """Check the cache once in the life of a process."""
    check_hashes(jars)


def _resolve_into(jars: Path, java: Path, report: Report) -> None:
    failures: list[str] = []
    for resolver in (_resolve_with_maven, _resolve_with_ivy):
        with tempfile.TemporaryDirectory(dir=jars.parent, prefix=".resolving-") as scratch:
            found = Path(scratch) / "jars"
            found.mkdir()
            try:
                resolver(java, Path(scratch), report)
                check_hashes(found)
            except DevstackError as error:
                report(str(error))
                failures.append(str(error))
                continue
            if not (found / f"kafka_2.13-{KAFKA_VERSION}.jar").exists():
                failures.append(f"{resolver.__name__} ended well but left no Kafka jar")
                continue
            found.rename(jars)
            return
    raise BrokerUnavailableError("cannot download Kafka's jars: " + "; then ".join(failures))


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that downloads Kafka's jars")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# Maven


def _resolve_with_maven(_java: Path, scratch: Path, report: Report) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise DevstackError("Maven (mvn) is not on PATH")
    dependencies = "".join(
        f"<dependency><groupId>{org}</groupId><artifactId>{name}</artifactId><version>{version}</version></dependency>"
        for org, name, version in _DEPENDENCIES
    )
    (scratch / "pom.xml").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>devstack</groupId><artifactId>jars</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>"
    )
    run_watched(
        "Maven",
        [
            *(
                maven,
                "--batch-mode",
                "--update-snapshots",
                "--file",
                str(scratch / "pom.xml"),
                "dependency:copy-dependencies",
            ),
            *("-DincludeScope=runtime", f"-DoutputDirectory={scratch / 'jars'}"),
        ],
        log=scratch.parent / "maven.log",
        on_line=_download_reporter("Maven", report),
    )


# Ivy


def _resolve_with_ivy(java: Path, scratch: Path, report: Report) -> None:
    ivy = _installed_ivy() or _downloaded_ivy(scratch, report)
    dependencies = "".join(
        f'<dependency org="{org}" name="{name}" rev="{version}" conf="default->default"/>'
        for org, name, version in _DEPENDENCIES
    )
    (scratch / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="devstack" module="jars"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{dependencies}</dependencies>'
        "</ivy-module>"
    )
    run_watched(
        "Ivy",
        [
            java,
            *java_trust_options(scratch),
            *("-jar", ivy, "-ivy", scratch / "ivy.xml", "-cache", scratch / "ivy-cache"),
            *("-confs", "default", "-types", "jar", "bundle"),
            *("-retrieve", f"{scratch}/jars/[artifact]-[revision](-[classifier]).[ext]"),
        ],
        log=scratch.parent / "ivy.log",
        on_line=_download_reporter("Ivy", report),
    )


def _installed_ivy() -> Path | None:
    """Return the Ivy jar of an installed PySpark, or the one kept from an earlier download."""
    spark = importlib.util.find_spec("pyspark")
    folders = [cache_directory().absolute()]
    if spark is not None and spark.origin is not None:
        folders.append(Path(spark.origin).parent / "jars")
    return next((jar for folder in folders for jar in sorted(folder.glob("ivy-*.jar"))), None)


def _downloaded_ivy(scratch: Path, report: Report) -> Path:
    """Download PySpark's source distribution and keep its Ivy jar, the one part we need."""
    report(f"downloading {_PYSPARK_SDIST} (about 430 MB, once) for the Ivy jar inside")
    run_watched(
        "pip",
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "pyspark", "--retries", "1"),
            *("--timeout", "15"),
            *("--progress-bar", "raw", "--dest", scratch / "sdist", _PYSPARK_SDIST),
        ],
        log=scratch.parent / "pip.log",
        on_line=_pip_reporter(report),
    )
    report("unpacking the Ivy jar")
    archive = next((scratch / "sdist").glob("pyspark-*.tar.gz"))
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            name = Path(member.name).name
            content = members.extractfile(member) if re.fullmatch(r"ivy-[\d.]+\.jar", name) else None
            if content is not None:
                kept = cache_directory().absolute() / name
                partial = kept.with_suffix(".partial")
                partial.write_bytes(content.read())
                return partial.rename(kept)
    raise DevstackError(f"no Ivy jar inside {archive.name}")


# Progress


def _download_reporter(tool: str, report: Report) -> Callable[[str], None]:
    """Count the jars that Maven ("Downloaded from x: .../a.jar (...)") or Ivy ("downloading ... a.jar") names."""
    count = 0

    def on_line(line: str) -> None:
        nonlocal count
        found = re.search(r"^(?:\[INFO\] )?download(?:ed|ing)\b.*?([\w.-]+\.jar)", line, re.IGNORECASE)
        if found and "Downloading" not in line:
            count += 1
            report(f"Kafka {KAFKA_VERSION}: {tool} fetched jar {count}, {found[1]}")

    return on_line


def _pip_reporter(report: Report) -> Callable[[str], None]:
    """Turn pip's "Progress 1000 of 9000" into megabytes."""
    shown = 0

    def on_line(line: str) -> None:
        nonlocal shown
        found = re.match(r"Progress (\d+) of (\d+)", line)
        if found and int(found[1]) - shown > 5_000_000:
            shown = int(found[1])
            report(f"downloading {_PYSPARK_SDIST}: {shown // 1_000_000} of {int(found[2]) // 1_000_000} MB")

    return on_line
