"""Harvesters beside an application: they start late, are replaced, survive forks, and live with real web servers."""

import os
import subprocess
import sys
from datetime import timedelta

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import conninfo_to_dict

from devstack.processes import wait_until
from outbox_core import OutboxRecord, Stasher
from outbox_core.config import HarvestConfig
from outbox_core.harvest import EmbeddedHarvester
from outbox_core.schema import TableName, create_hold_sql, create_inbox_sql, create_table_sql
from tests.integration.harvest.serving import CHECKOUT, Server, write_files
from tests.kafka_reader import read_topic

_PATIENCE_SECONDS = 60.0
_PAGE = "how-to-embedding.md"
_TABLE = TableName("outbox")

_FORKED = """
import os, sys
from datetime import timedelta
from outbox_core.config import HarvestConfig
from outbox_core.harvest import EmbeddedHarvester

config = HarvestConfig(
    data_source="host=127.0.0.1 port=1 password=secret",
    base_kafka_config={"bootstrap.servers": "127.0.0.1:1"},
)
embedded = EmbeddedHarvester(config)
embedded.start()
child = os.fork()
if not child:
    print(embedded.health(), embedded.is_leader, embedded.stop(), flush=True)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
while embedded.health().ok:
    pass
print(embedded.health(), embedded.stop())
"""


def _make_tables(database):
    with psycopg.connect(database) as connection:
        for statement in (create_table_sql(_TABLE), create_hold_sql(_TABLE), create_inbox_sql(TableName("inbox"))):
            connection.execute(statement)


@pytest.fixture
def environment(database, kafka_bootstrap, topic_name):
    """The environment of applications: a database with the tables, the broker, a topic of its own."""
    _make_tables(database)
    return {
        "OUTBOX_POSTGRES_DSN": database,
        "OUTBOX_KAFKA_BOOTSTRAP": kafka_bootstrap,
        "ORDERS_TOPIC": topic_name("orders"),
    }


def test_it_starts_as_soon_as_it_can(database, kafka_bootstrap, make_topic):
    """Without a table it is not healthy and says why; when there is one, it leads, publishes, and stops."""
    topic = make_topic()
    config = HarvestConfig(data_source=database, base_kafka_config={"bootstrap.servers": kafka_bootstrap})
    with EmbeddedHarvester(config, retry_after=timedelta(milliseconds=100)) as embedded:
        assert wait_until(lambda: not embedded.health().ok, _PATIENCE_SECONDS)
        assert "outbox" in embedded.health().detail
        with pytest.raises(RuntimeError, match="started once"):
            embedded.start()
        _make_tables(database)
        with psycopg.connect(database) as connection:
            Stasher().stash(connection, OutboxRecord(topic=topic, key="a", value=b"1"))
        assert wait_until(lambda: embedded.is_leader and embedded.health().ok, _PATIENCE_SECONDS)
        assert wait_until(lambda: _waiting(database) == 0, _PATIENCE_SECONDS)
    assert embedded.health().detail == "stopped"
    assert [record.value for record in read_topic(kafka_bootstrap, topic)] == [b"1"]


def test_another_takes_its_place(database, kafka_bootstrap):
    """A harvester that an error ends is replaced by another one."""
    _make_tables(database)
    config = HarvestConfig(data_source=database, base_kafka_config={"bootstrap.servers": kafka_bootstrap})
    with EmbeddedHarvester(config, retry_after=timedelta(milliseconds=100)) as embedded:
        assert wait_until(lambda: embedded.is_leader, _PATIENCE_SECONDS)
        embedded._harvester.give_up(ValueError("broken"))
        assert wait_until(lambda: not embedded.is_leader, _PATIENCE_SECONDS)
        assert wait_until(lambda: embedded.is_leader, _PATIENCE_SECONDS)


def test_a_fork_has_none():
    """In a process that was forked afterwards it says so, does nothing, and keeps nothing from ending."""
    ran = subprocess.run(
        [sys.executable, "-c", _FORKED], cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    child, parent = ran.stdout.splitlines()
    assert "before this one was forked; start one in each worker" in child
    assert child.endswith("False True")
    assert "ok=False" in parent
    assert parent.endswith("True")
    assert "secret" not in ran.stdout + ran.stderr


def test_servers_hand_over(environment, database, tmp_path):
    """Two servers of the page: a repeated request has one effect, and one leads when the other has stopped."""
    write_files(_PAGE, tmp_path, "service.py")
    uvicorn = (tmp_path, environment, "uvicorn", "service:app", "--port=PORT")
    with Server(*uvicorn) as one, Server(*uvicorn) as other:
        assert wait_until(lambda: _leads(one) != _leads(other), _PATIENCE_SECONDS), one.log + other.log
        leader, standby = (one, other) if _leads(one) else (other, one)
        assert wait_until(lambda: "standing by" in _health(standby)["detail"], _PATIENCE_SECONDS), standby.log
        answers = [_order(standby, 1, key="k").status_code for _ in range(2)]
        assert answers == [201, 200]
        leader.terminate()
        assert wait_until(lambda: _leads(standby), _PATIENCE_SECONDS), standby.log
        assert _order(standby, 2).status_code == 201
        assert wait_until(lambda: _waiting(database) == 0, _PATIENCE_SECONDS), standby.log
        standby.terminate()
    records = read_topic(environment["OUTBOX_KAFKA_BOOTSTRAP"], environment["ORDERS_TOPIC"])
    assert sorted(record.value for record in records) == [b'{"id":1}', b'{"id":2}']


@pytest.fixture
def shop(database, kafka_bootstrap):
    """The environment of the example's shop, migrated."""
    made = {
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "SHOP_DATABASE_DSN": database,
        "OUTBOX_KAFKA_BOOTSTRAP": kafka_bootstrap,
    }
    command = [sys.executable, "example_project/manage.py", "migrate", "--verbosity=0"]
    subprocess.run(command, cwd=CHECKOUT, env={**os.environ, **made}, check=True)
    return made


@pytest.mark.complete
def test_django_under_asgi(shop, database, tmp_path):
    """The page's asgi.py serves the shop, and publishes what an order stashes; SIGTERM ends both."""
    write_files(_PAGE, tmp_path, "asgi.py")
    with psycopg.connect(database) as connection:
        connection.execute(
            "INSERT INTO shop_product (name, price_cents, stock, movements_count) VALUES ('Pen', 1, 9, 0)"
        )
    with Server(tmp_path, shop, "uvicorn", "asgi:application", "--port=PORT") as server:
        order = {"customer": "Ada", "basket": {"1": 2}}
        assert server.request("POST", "/orders/", json=order).status_code == 201, server.log
        assert wait_until(lambda: _waiting(database) == 0, _PATIENCE_SECONDS), server.log
        server.terminate()


_STARTED_AT_IMPORT = """
import os
from outbox_core.config import load_config
from outbox_core.harvest import EmbeddedHarvester

harvester = EmbeddedHarvester(load_config(None, environ=os.environ))
harvester.start()

def app(environ, start_response):
    health = harvester.health()
    start_response("200 OK" if health.ok else "503 Down", [("Content-Type", "text/plain")])
    return [health.detail.encode()]
"""


@pytest.mark.real_broker
@pytest.mark.complete
@pytest.mark.parametrize(
    "command",
    [
        ("uvicorn", "service:app", "--port=PORT", "--workers=2"),
        ("gunicorn", "service:app", "--bind=127.0.0.1:PORT", "--workers=2", "-k=asgi"),
        ("gunicorn", "service:app", "--bind=127.0.0.1:PORT", "--workers=2", "-k=asgi", "--preload"),
    ],
    ids=["uvicorn", "gunicorn", "gunicorn-preload"],
)
def test_workers_each_have_a_harvester(environment, kafka_bootstrap, database, tmp_path, command):
    """Each worker has a harvester, of which one leads; all of them end with the server."""
    write_files(_PAGE, tmp_path, "service.py")
    with Server(tmp_path, environment, *command) as server:
        assert _order(server, 1).status_code == 201
        assert wait_until(lambda: _waiting(database) == 0, _PATIENCE_SECONDS), server.log
        assert wait_until(lambda: _harvesters(kafka_bootstrap, database) == 2, _PATIENCE_SECONDS), server.log
        server.terminate()
    assert wait_until(lambda: _harvesters(kafka_bootstrap, database) == 0, _PATIENCE_SECONDS)


@pytest.mark.real_broker
@pytest.mark.complete
@pytest.mark.parametrize("arguments", [[], ["--preload"], ["--worker-class=gthread", "--threads=2"]])
def test_gunicorn_with_hooks(shop, kafka_bootstrap, database, tmp_path, arguments):
    """The page's gunicorn.conf.py starts a harvester in each worker of a WSGI application, and stops it."""
    write_files(_PAGE, tmp_path, "gunicorn.conf.py")
    application = "django.core.wsgi:get_wsgi_application()"
    with Server(tmp_path, shop, "gunicorn", application, "--bind=127.0.0.1:PORT", "--workers=2", *arguments) as server:
        assert server.request("GET", "/").status_code == 200, server.log
        assert wait_until(lambda: _harvesters(kafka_bootstrap, database) == 2, _PATIENCE_SECONDS), server.log
        server.terminate()
    assert wait_until(lambda: _harvesters(kafka_bootstrap, database) == 0, _PATIENCE_SECONDS)


@pytest.mark.real_broker
@pytest.mark.complete
def test_a_harvester_started_before_the_fork(environment, kafka_bootstrap, database, tmp_path):
    """Started at import under --preload, it runs in the main process; each worker's health says that it has none."""
    (tmp_path / "early.py").write_text(_STARTED_AT_IMPORT)
    command = ("gunicorn", "early:app", "--bind=127.0.0.1:PORT", "--workers=2", "--preload")
    with Server(tmp_path, environment, *command) as server:
        answer = server.request("GET", "/")
        assert (answer.status_code, "before this one was forked" in answer.text) == (503, True)
        assert wait_until(lambda: _harvesters(kafka_bootstrap, database) == 1, _PATIENCE_SECONDS), server.log
        server.terminate()


def _harvesters(kafka_bootstrap, database):
    """Count the members of the group in which the outbox's harvesters elect their leader."""
    group = f"{conninfo_to_dict(database)['dbname']}.public.outbox"
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    return len(admin.describe_consumer_groups([group])[group].result(30).members)


def _health(server):
    return server.request("GET", "/healthz").json()


def _leads(server):
    return _health(server)["leads"]


def _order(server, number, key=None):
    headers = {} if key is None else {"Idempotency-Key": key}
    return server.request("POST", "/orders", json={"id": number}, headers=headers)


def _waiting(database):
    with psycopg.connect(database) as connection:
        return connection.execute("SELECT count(*) FROM outbox").fetchone()[0]
