"""The demo of the whole chain, small: an order's way from an HTTP request into the revenue table, through two kills."""

import subprocess
import sys

import pytest

from example_project.demo.applications import CHECKOUT


@pytest.mark.complete
@pytest.mark.real_broker
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [[], ["--cluster"]])
def test_the_demo_of_the_pipeline(options):
    """The demo's revenue equals the orders table's for every product and hour, after both kills; also on a cluster."""
    command = [sys.executable, "-m", "example_project.demo_pipeline", "--orders=300", *options]
    ran = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=850, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("SIGKILL to") == 2
    assert "Equal for every product and hour, to the cent." in ran.stdout
