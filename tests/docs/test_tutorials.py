"""Whole tutorials, as a reader pastes them: docs/quickstart.md, and the program of docs/deploying.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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
    script = "set -e\n" + "".join(_step(block) for block in blocks if block.language in {"bash", "python"})
    ports = {name: str(free_port()) for name in ("9101", "9102")}
    for given, free in ports.items():
        script = script.replace(given, free)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    finally:  # a page that failed in the middle has not stopped its services
        down = [sys.executable, "-m", "devstack", "down", "--dir", str(tmp_path / "services")]
        subprocess.run(down, cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line for block in blocks if not block.language for line in block.text.splitlines()]
    assert len(printed) > 5
    assert [line for line in printed if line not in done.stdout.splitlines()] == []
    states = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if '"leader"' in line]
    assert sorted(state["detail"] for state in states) == ["leading", "standing by"]


def _step(block: Block) -> str:
    """Return the lines of a script that do a block's work: a file is written under the name in its first line."""
    if block.language == "bash":
        return _INSTALLS.sub("", block.text)
    name = block.text.splitlines()[0].removeprefix("# ")
    return f"cat > {name} <<'OF_THE_PAGE'\n{block.text}OF_THE_PAGE\n"


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
