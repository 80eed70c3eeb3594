"""Applications of others, small ones of each kind, whose own test suites run where the wheel is installed."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from devstack.ports import LOCALHOST, free_port
from tests.packaging.environments import Environment

HOSTS = Path(__file__).parent / "hosts"
TESTED_WITH = ("pytest", "pytest-django", "fastapi", "httpx")
_PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_POOLER = """
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = {listen}
listen_port = {pooler}
unix_socket_dir =
auth_type = any
pool_mode = transaction
server_idle_timeout = 1
ignore_startup_parameters = options
{account}
"""

pytestmark = [pytest.mark.complete, pytest.mark.timeout(600)]  # packages may have to be fetched


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Return the one environment of all hosts."""
    what = (f"{wheel}[harvester,sqlalchemy,django]", *TESTED_WITH)
    return Environment(tmp_path_factory.mktemp("hosts"), *what)


@pytest.fixture
def run_suite(environment, database):
    """Return a function that runs the suite of a host on a fresh database, and returns what pytest has told."""

    def run(name, **variables):
        folder = environment.folder / name
        shutil.copytree(HOSTS / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        done = environment.run(
            "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=folder, HOST_DATABASE=database, **variables
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout
        return done.stdout

    return run


@pytest.fixture
def pooler(database, tmp_path):
    """Yield the URL of the database behind PgBouncer, which lends its connections for a transaction."""
    if _PGBOUNCER is None:
        pytest.skip("pgbouncer is not on the PATH: Debian's package has it")
    server, port = conninfo_to_dict(database), free_port()
    server["password"] = server.get("password", "")
    account = "user = nobody" if os.geteuid() == 0 else ""
    settings = tmp_path / "pgbouncer.ini"
    settings.write_text(_POOLER.format(**server, listen=LOCALHOST, pooler=port, account=account))
    process = subprocess.Popen([_PGBOUNCER, "-q", settings], stdin=subprocess.DEVNULL)
    url = f"postgresql://{server['user']}@{LOCALHOST}:{port}/{server['dbname']}"
    try:
        _await(url, process)
        yield url
    finally:
        process.kill()
        process.wait()


def _await(url, process):
    """Wait until a database answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
        except psycopg.OperationalError:
            assert process.poll() is None, "pgbouncer has ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


def test_joined_transaction(run_suite):
    """A suite of SQLAlchemy's recipe, whose tests join a transaction and roll it back."""
    run_suite("joined_transaction")


def test_injected_session(run_suite):
    """A FastAPI application whose session is injected, with more requests at once than its pool has connections."""
    run_suite("injected_session")


def test_atomic_requests(run_suite):
    """A Django project whose requests are transactions, and whose receivers stash."""
    run_suite("atomic_requests")


@pytest.mark.real_broker
def test_transaction_pooler(run_suite, pooler, kafka_bootstrap, make_topic):
    """A Django project behind PgBouncer in transaction mode, with a direct way for harvester, commands and console."""
    run_suite("transaction_pooler", HOST_POOLER=pooler, HOST_KAFKA=kafka_bootstrap, HOST_TOPIC=make_topic())


def test_sqlite_suite(run_suite):
    """A suite on SQLite of projects that run on PostgreSQL: one fixture for all of it."""
    run_suite("sqlite_suite")


def test_second_admin(run_suite):
    """A Django project whose operators have an AdminSite of their own."""
    run_suite("second_admin")
