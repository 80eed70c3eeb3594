"""Ctrl-C of tests that run side by side."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devstack.processes import command_line, wait_until

CHECKOUT = Path(__file__).parents[3]
TEST = """
import pathlib, signal, time

def test_that_is_interrupted(private_stack):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as if it took too long to stop its servers: it is killed
    report = pathlib.Path(__file__).with_name("report")
    report.write_text(f"{private_stack.directory}\\n{private_stack.postgres.pid}\\n{private_stack.kafka.pid}\\n\\n")
    time.sleep(600)
"""


@pytest.mark.complete
def test_an_interrupted_session_leaves_no_server(tmp_path):
    """Ctrl-C ends `pytest -n` with all private servers of its processes, and removes what they kept."""
    test, report = tmp_path / "test_interrupted.py", tmp_path / "report"
    test.write_text(TEST)
    options = ["-n", "1", "-p", "tests.services", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OUTBOX_DEVSTACK_EMBEDDED": "1"}
    command = [sys.executable, "-m", "pytest", *options, test]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True) as session:
        assert wait_until(lambda: report.exists() and report.read_text().endswith("\n\n"), 120)
        directory, *pids = report.read_text().split()
        assert all(command_line(int(pid)) for pid in pids)
        os.killpg(session.pid, signal.SIGINT)
        session.wait(120)
    assert wait_until(lambda: not any(command_line(int(pid)) for pid in pids), 10)
    assert not Path(directory).exists()
