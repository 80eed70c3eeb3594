"""The example project: both applications by their interfaces, and the demo as a whole."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx
import psycopg
import pytest
from alembic import command
from alembic.config import Config

from example_project.demo.check import Received, Stashed, check
from example_project.payments.app import app
from outbox_core.formats.cloud_events import CloudEvent
from outbox_core.holds import Holds
from outbox_core.schema import TableName
from tests.kafka_reader import read_topic

_CHECKOUT = Path(__file__).parents[3]
_MANAGE = [sys.executable, "example_project/manage.py"]
_ALEMBIC = [sys.executable, "-m", "alembic", "-c", "example_project/payments/alembic.ini"]
_DEMO = [sys.executable, "-m", "example_project.demo"]


@pytest.fixture
def example_environment(database):
    """The environment of both applications, on one fresh database."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "SHOP_DATABASE_DSN": database,
        "PAYMENTS_DATABASE_DSN": database,
    }


@pytest.fixture
def payments_database(database, monkeypatch):
    """A migrated database of the payment service, with two accounts, one of them empty."""
    monkeypatch.setenv("PAYMENTS_DATABASE_DSN", database)
    command.upgrade(Config(_CHECKOUT / "example_project/payments/alembic.ini"), "head")
    with psycopg.connect(database) as connection:
        connection.execute(
            "INSERT INTO account (id, owner, balance_cents, entries_count) VALUES (1, 'Ada', 1000, 0), (2, 'Bo', 0, 0)"
        )
    return database


def test_the_shop(example_environment):
    """The shop's own tests pass: orders by Django's client, with the records that they stash."""
    ran = _succeed([*_MANAGE, "test", "example_project.shop", "--noinput"], example_environment)
    assert re.search(r"Ran \d+ tests", ran.stderr)


def test_the_migrations_are_complete(payments_database, example_environment):
    """Neither Django nor Alembic finds a difference between the models and the migrations, the outboxes included."""
    assert payments_database
    _succeed([*_MANAGE, "makemigrations", "--check"], example_environment)
    _succeed([*_ALEMBIC, "check"], example_environment)


def test_the_payments_outbox_can_hold_records(payments_database):
    """The migrations make the table of holds, without which a record that Kafka refuses is tried for ever."""
    with psycopg.connect(payments_database) as connection:
        assert Holds(TableName("payments_outbox"), "me").list(connection) == []


def test_a_payment_is_made_with_its_messages(payments_database, outbox_records):
    """A payment over HTTP moves the money and stashes the payment and both entries in the same transaction."""
    answers = _post({"payer": 1, "payee": 2, "amount_cents": 300}, {"payer": 1, "payee": 2, "amount_cents": 100})

    assert [status for status, _ in answers] == [201, 201]
    with psycopg.connect(payments_database) as connection:
        accounts = connection.execute("SELECT id, balance_cents, entries_count FROM account ORDER BY id").fetchall()
        rows = connection.execute(
            "SELECT kafka_topic, kafka_key, kafka_value,"
            " kafka_header_values[array_position(kafka_header_keys, 'ce_number')] FROM payments_outbox ORDER BY id"
        ).fetchall()
    assert accounts == [(1, 600, 2), (2, 400, 2)]
    assert [(topic, key, number) for topic, key, _, number in rows] == [
        ("payments.payments", answers[0][1]["payment"], b"1"),
        ("payments.entries", "1", b"1"),
        ("payments.entries", "2", b"1"),
        ("payments.payments", answers[1][1]["payment"], b"1"),
        ("payments.entries", "1", b"2"),
        ("payments.entries", "2", b"2"),
    ]
    assert json.loads(rows[-1][2])["balance_cents"] == 400
    assert [(record.topic, record.key, record.value.encode()) for record in outbox_records.committed] == [
        (topic, key, value) for topic, key, value, _ in rows
    ]
    outbox_records.assert_stashed(
        "payments.entries",
        key=2,
        value={"payment": answers[0][1]["payment"], "amount_cents": 300, "balance_cents": 300},
        headers={"ce_type": "com.example.payment.entry", "ce_number": "1"},
        count=1,
    )


def test_a_payment_that_cannot_be_leaves_nothing(payments_database, outbox_records):
    """A refused payment is neither in the tables nor in the outbox."""
    answers = _post(
        {"payer": 1, "payee": 2, "amount_cents": 1001},
        {"payer": 1, "payee": 3, "amount_cents": 1},
        {"payer": 1, "payee": 1, "amount_cents": 1},
        {"payer": 1, "payee": 2, "amount_cents": -1},
        {"payer": 1, "payee": 2, "amount_cents": True},
        {"payer": 1, "payee": 2},
        ["not", "a", "payment"],
    )
    assert [status for status, _ in answers] == [409, 404, 400, 400, 400, 400, 400]
    outbox_records.assert_not_stashed()
    assert _rows(payments_database) == [0, 0, 0]


def test_a_payment_that_fails_at_its_commit_leaves_nothing(payments_database):
    """A refusal at the commit rolls back the records that were stashed before."""
    with psycopg.connect(payments_database) as connection:
        connection.execute(
            """
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$;
            CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON payments_outbox DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION refuse()
            """
        )
    assert [status for status, _ in _post({"payer": 1, "payee": 2, "amount_cents": 1})] == [500]
    assert _rows(payments_database) == [0, 0, 0]


def test_place_counts_what_it_did(payments_database, example_environment):
    """The command makes exactly so many payments; a rolled-back one is neither in the data nor in the outbox."""
    with psycopg.connect(payments_database) as connection:
        connection.execute("DELETE FROM account")
    place = [sys.executable, "-m", "example_project.payments", "place", "--count=30", "--rollback-share=0.5"]
    tally = json.loads(_succeed(place, example_environment).stdout)
    assert tally["paid"] == 30
    assert tally["rolled_back"]["payments.payments"] > 0
    assert _rows(payments_database) == [30, 60, 90]


def test_the_verdict():
    """The demo's check counts lost, reordered, repeated and invented records, and allows adjacent repeats only."""
    stashed = [Stashed("t", key, number, f"{key}{number}") for key in "abcd" for number in (1, 2, 3)]

    def verdict(*arrivals):
        received = [Received("t", arrival[0], int(arrival[1]), arrival, 0, 0.0) for arrival in arrivals]
        [found] = check(["t"], stashed, received)
        return found.received, found.lost, found.reordered, found.repeated, found.invented

    in_order = [row.event_id for row in stashed]
    assert verdict(*in_order) == (12, 0, 0, 0, 0)
    assert verdict("a1", *in_order) == (12, 0, 0, 1, 0)
    assert verdict(*in_order[:-1]) == (11, 1, 0, 0, 0)
    assert verdict(*in_order, "d2") == (12, 0, 1, 1, 0)
    assert verdict("a2", "a1", "a3", *in_order[3:]) == (12, 0, 1, 0, 0)
    assert verdict(*in_order, "d4") == (12, 0, 0, 0, 1)


def test_a_key_in_two_partitions_has_no_order():
    """The demo's check counts a record in another partition than its key's first one as reordered."""
    stashed = [Stashed("t", "a", number, f"a{number}") for number in (1, 2)]
    received = [Received("t", "a", number, f"a{number}", number, 0.0) for number in (1, 2)]
    [found] = check(["t"], stashed, received)
    assert (found.lost, found.reordered, found.is_good) == (0, 1, False)


@pytest.mark.real_broker
@pytest.mark.timeout(150)
def test_the_demo():
    """A small demo ends with exit code 0, and the numbers in its table agree."""
    environment = {**os.environ, "COLUMNS": "120"}
    ran = subprocess.run(
        [*_DEMO, "--records", "400"],
        cwd=_CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=140,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Kafka: real broker" in ran.stdout
    assert ran.stdout.count("SIGKILL to") == 2
    for application, records in (("shop", 220), ("payments", 201)):
        numbers = re.search(rf"^ *{application}, both +(.*)$", ran.stdout, re.MULTILINE).group(1).split()
        stashed, _, received, lost, reordered = map(int, numbers[:5])
        assert (stashed, received, lost, reordered) == (records, records, 0, 0)
        assert 0 < float(numbers[6]) < 60, "seconds without a leader"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="knows processes by /proc")
@pytest.mark.complete
def test_an_interrupted_demo_leaves_nothing_behind():
    """Ctrl-C stops every process that the demo started, however often it is pressed."""
    mark = f"STARTED_BY={uuid.uuid4()}"
    environment = {**os.environ, "OUTBOX_DEVSTACK_EMBEDDED": "1", **dict([mark.split("=")])}
    with subprocess.Popen(_DEMO, cwd=_CHECKOUT, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        while not demo.stdout.readline().startswith("  stashed"):
            assert demo.poll() is None
        assert len(_processes_with(mark)) > 7  # the demo, Postgres, the broker, four harvesters, two loads
        demo.send_signal(signal.SIGINT)
        time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
        assert demo.wait(60) == 130
    assert "everything is stopped" in rest
    assert _processes_with(mark) == []


@pytest.mark.parametrize("records", ["0", "many"])
def test_the_demo_refuses_nonsense(records):
    """A wrong argument is one clear line and exit code 2."""
    ran = subprocess.run([*_DEMO, "--records", records], cwd=_CHECKOUT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "--records: expected a whole number" in ran.stderr


@pytest.mark.real_broker
def test_the_shop_sends_its_emails(example_environment, kafka_bootstrap, tmp_path):
    """Orders are placed, their tasks are published and run, and the worker ends cleanly on SIGTERM."""
    folder = tmp_path / "emails"
    environment = example_environment | {
        "OUTBOX_KAFKA_BOOTSTRAP": kafka_bootstrap,
        "SHOP_EMAIL_BACKEND": "django.core.mail.backends.filebased.EmailBackend",
        "SHOP_EMAIL_FOLDER": str(folder),
    }
    for arguments in (["migrate"], ["place_orders", "--count=3", "--concurrency=1"], ["run_harvester", "--drain"]):
        _succeed([*_MANAGE, *arguments], environment)
    worker = subprocess.Popen([*_MANAGE, "run_tasks"], cwd=_CHECKOUT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while _emails(folder) < 3:
            assert time.monotonic() < deadline, "not every e-mail was sent"
            time.sleep(0.1)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
    assert _emails(folder) == 3


def _emails(folder):
    return sum(path.read_text().count("Subject: Your order") for path in folder.glob("*")) if folder.exists() else 0


def _succeed(arguments, environment):
    ran = subprocess.run(arguments, cwd=_CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.mark.real_broker
def test_a_repeated_payment_is_made_once_and_published(payments_database, kafka_bootstrap, monkeypatch):
    """A payment that comes twice with its Idempotency-Key is one event, which the service's own harvester publishes."""
    monkeypatch.setenv("PAYMENTS_HARVEST", "1")
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", payments_database)
    monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", kafka_bootstrap)
    payment = {"payer": 1, "payee": 2, "amount_cents": 300}
    answers = []

    async def pay_and_wait():
        async with _client() as client:
            for asked in (payment, payment, {**payment, "amount_cents": 1}):
                answer = await client.post("/payments", json=asked, headers={"Idempotency-Key": "k"})
                answers.append((answer.status_code, answer.json().get("payment")))
            while _rows(payments_database)[2]:  # pytest's timeout ends it
                assert (await client.get("/healthz")).status_code == 200
                await asyncio.sleep(0.1)

    asyncio.run(pay_and_wait())
    (made, paid), again, other = answers
    assert (made, again, other) == (201, (201, paid), (422, None))
    assert _rows(payments_database) == [1, 2, 0]
    events = [
        CloudEvent.of(message.headers, message.value)
        for message in read_topic(kafka_bootstrap, "payments.payments")
        if message.key == paid.encode()
    ]
    assert [(event.id, event.json()) for event in events] == [(paid, payment)]


def _post(*payments):
    """Post each payment to the service itself, without a server; return the status and answer of each."""

    async def post_all():
        async with _client() as client:
            answers = [await client.post("/payments", json=payment) for payment in payments]
        return [(answer.status_code, answer.json() if answer.status_code < 500 else None) for answer in answers]

    return asyncio.run(post_all())


@contextlib.asynccontextmanager
async def _client():
    """Yield a client of the service, which runs meanwhile."""
    async with app.router.lifespan_context(app) as state:
        transport = httpx.ASGITransport(_with_state(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://payments") as client:
            yield client


def _with_state(state):
    """Hand each request a copy of the lifespan's state, as a server does."""

    async def with_state(scope, receive, send):
        await app({**scope, "state": dict(state)}, receive, send)

    return with_state


def _rows(database):
    with psycopg.connect(database) as connection:
        return [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("payment", "entry", "payments_outbox")
        ]


def _processes_with(mark):
    """Return the processes that have inherited a variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found
