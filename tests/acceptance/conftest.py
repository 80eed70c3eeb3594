"""Sites for the fault tests: outboxes under load with their own harvester processes."""

import pytest

from tests.acceptance.site import Site


@pytest.fixture
def make_site(tmp_path, make_topic):
    """Yield a factory for sites of two topics each: `make_site(name, dsn, bootstrap, ...)`; all end after the test."""
    made = []

    def make(name, dsn, bootstrap, **settings):
        topics = [make_topic(bootstrap=bootstrap) for _ in range(2)]
        site = Site(tmp_path / name, dsn, bootstrap, topics, table=f"outbox_{name}", **settings)
        made.append(site)
        return site

    yield make
    for site in made:
        site.discard()


@pytest.fixture
def say(capsys):
    """Print past pytest's capture: the numbers of a fault test are worth reading when it passes, too."""

    def say(text):
        with capsys.disabled():
            print(f"\n    {text}", end="")  # noqa: T201

    return say
