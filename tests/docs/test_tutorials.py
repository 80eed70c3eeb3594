"""Whole tutorials, as a reader pastes them.

docs/quickstart.md with services of its own; tutorial-django.md, how-to-fastapi.md and how-to-flask.md on those of the
tests; the program of docs/deploying.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from devstack.ports import free_port
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.worlds import make_outbox

# The tests' own environment stands in for what the page installs.
_INSTALLS = re.compile(r"^(pip install|python3 -m venv|\. \.venv/bin/activate).*\n", re.MULTILINE)


@pytest.mark.complete
@pytest.mark.real_broker
def test_the_quickstart_works_as_printed(tmp_path: Path) -> None:
    """Its blocks run in one shell, in an empty folder, and print what the page prints."""
    (tmp_path / "kafka-outbox").symlink_to(ROOT)
    blocks = blocks_of(ROOT / "docs/quickstart.md")
    try:
        printed = _run_page(blocks, tmp_path, ports=("9101", "9102"))
    finally:  # a page that failed in the middle has not stopped its services
        down = [sys.executable, "-m", "devstack", "down", "--dir", str(tmp_path / "services")]
        subprocess.run(down, cwd=ROOT, check=False, capture_output=True)
    states = [json.loads(line.partition(" ")[2]) for line in printed if '"leader"' in line]
    assert sorted(state["detail"] for state in states) == ["leading", "standing by"]


@pytest.mark.complete
@pytest.mark.real_broker
@pytest.mark.parametrize("page", ["tutorial-django.md", "how-to-fastapi.md", "how-to-flask.md"])
def test_a_framework_works_as_printed(page: str, tmp_path: Path, private_stack, private_database) -> None:
    """From an empty folder to a record in Kafka; the table is empty afterwards."""
    if missing := [name for name in ("psql", "curl") if shutil.which(name) is None]:
        pytest.skip(f"the page uses {' and '.join(missing)}")
    services = {"OUTBOX_POSTGRES_DSN": private_database, "OUTBOX_KAFKA_BOOTSTRAP": private_stack.kafka.bootstrap}
    # A second application on the page is for another purpose.
    blocks = [
        block
        for block in blocks_of(ROOT / "docs" / page)
        if not block.text.startswith("# embedded.py") and not block.mark.startswith("not run")
    ]
    _run_page(blocks, tmp_path, ports=("8000",), **services)
    with psycopg.connect(private_database) as connection:
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (0,)


def _run_page(blocks: list[Block], folder: Path, *, ports: tuple[str, ...], **services: str) -> list[str]:
    """Run all blocks in one shell, on free ports; return what they printed, after comparing it with the page."""
    script = "set -e\n" + "".join(_step(block) for block in blocks if block.language in {"bash", "python"})
    script = script.replace("sleep 10", "sleep 30")  # a first election takes longer on a busy machine
    for port in ports:
        script = script.replace(port, str(free_port()))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "DJANGO_"))},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **services,
    }
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = shell.communicate(timeout=240)
    finally:  # with the servers that a page which failed has left
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, output + errors
    told = [line for block in blocks if not block.language for line in block.text.splitlines()]
    assert told
    printed = output.splitlines()
    assert [line for line in told if line not in printed] == [], output
    return printed


def _step(block: Block) -> str:
    """Return the lines of a script that do a block's work: a file is written under the name in its first line."""
    if block.language == "bash":
        return _INSTALLS.sub("", block.text)
    name = block.text.splitlines()[0].removeprefix("# ")
    if name.startswith("at the end of "):
        name = f"> {name.removeprefix('at the end of ')}"
    return f"cat >{name} <<'OF_THE_PAGE'\n{block.text}OF_THE_PAGE\n"


@pytest.mark.complete
def test_the_embedded_harvester_leads(database, kafka_bootstrap) -> None:
    """The program of docs/deploying.md harvests in a process of its own, and leads before it ends."""
    make_outbox(database)
    program = next(
        block.text for block in blocks_of(ROOT / "docs/deploying.md") if block.text.startswith("# embedded.py")
    )
    environment = {**os.environ, "OUTBOX_POSTGRES_DSN": database, "OUTBOX_KAFKA_BOOTSTRAP": kafka_bootstrap}
    patient = program.replace("range(5)", "range(20)")  # seconds: a first election takes longer on a busy machine
    done = subprocess.run(
        [sys.executable, "-c", patient], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "this process leads" in done.stderr
