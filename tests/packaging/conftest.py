"""The wheel, built once for all that install it."""

import subprocess
import sys

import pytest

from tests.packaging.environments import CHECKOUT

collect_ignore = ["hosts"]  # suites of others, which run where the wheel is installed


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Return the built wheel."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("kafka_outbox-*.whl")
    return built
