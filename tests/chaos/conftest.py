"""The services of the chaos suite: of its own, as its faults kill them, and quick to notice failures."""

import os
import uuid

import pytest

from tests.chaos.ill import CREW
from tests.chaos.run import ChaosRun, new_seed
from tests.chaos.services import Services


@pytest.fixture(scope="session")
def services():
    """Yield Postgres and Kafka of the chaos suite, for one run at a time; both are running at the end of each."""
    with Services(sides=CREW) as services:
        yield services


@pytest.fixture
def three_brokers(cluster):
    """Yield Postgres, and the session's three brokers behind proxies."""
    with Services(cluster=cluster, sides=CREW) as services:
        yield services


@pytest.fixture
def say(capsys):
    """Print past pytest's capture: the numbers are worth reading when a run is clean, too."""

    def say(text):
        with capsys.disabled():
            print("".join(f"\n    {line}" for line in text.splitlines()), end="")  # noqa: T201

    return say


@pytest.fixture
def make_run(request, tmp_path, say):
    """Return a factory for runs, by default on the shared services; OUTBOX_TEST_SEED repeats a schedule."""

    def make(name, services=None, **settings):
        services = services or request.getfixturevalue("services")
        seed = int(os.environ.get("OUTBOX_TEST_SEED", new_seed()))
        say(f"seed {seed}, logs in {tmp_path}")
        name = f"{name}_{uuid.uuid4().hex[:4]}_"  # a test that services failed is run again, on the same ones
        return ChaosRun(services, name=name, seed=seed, directory=tmp_path, say=say, **settings)

    return make
