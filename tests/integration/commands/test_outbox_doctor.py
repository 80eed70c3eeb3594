"""`outbox doctor` and `outbox status` against the real services, in order and with faults."""

import json
from io import StringIO

import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from django.core.management import call_command

from devstack.postgres import Postgres
from outbox_core.cli import main
from outbox_core.config import HarvestConfig
from outbox_core.doctor import postgres as postgres_examination
from outbox_core.doctor.findings import CommandLine
from outbox_core.doctor.postgres import PostgresChecks
from outbox_core.doctor.session import DatabaseSession
from outbox_core.election import Neli, NeliConfig
from outbox_core.harvest import Harvester
from outbox_core.schema import (
    STORAGE_PARAMETERS,
    TableName,
    add_checks_sql,
    create_history_sql,
    create_hold_sql,
    create_inbox_sql,
    create_table_sql,
    drop_checks_sql,
    notify_sql,
)
from tests.harvesting import wait_until
from tests.integration.django.django_fixtures import django_db_modify_db_settings
from tests.kafka_reader import read_topic
from tests.services import as_role
from tests.topic_settings import alter_topic

__all__ = ["django_db_modify_db_settings"]

INSERT = (
    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) SELECT %s, i::text, 'x' FROM generate_series(1, %s) i"
)


pytestmark = pytest.mark.usefixtures("connection")


@pytest.fixture
def connection(database, kafka_bootstrap, monkeypatch):
    """A connection to a database with an empty outbox, which the environment names to the command."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", database)
    monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", kafka_bootstrap)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
        connection.execute(create_hold_sql(TableName("outbox")))
        yield connection


@pytest.fixture
def run(capsys):
    """Run a command with `--json`; return the exit code and the document."""

    def run(*arguments):
        code = main([*arguments, "--json", "--timeout", "60"])
        return code, json.loads(capsys.readouterr().out)

    return run


def of(findings, verdict):
    """Return the findings of one verdict, by subject."""
    return {found["subject"]: found for found in findings if found["verdict"] == verdict}


def test_sound_surroundings_have_no_problem(run):
    """A fresh outbox without a harvester: exit code 0, no problem, no warning but of the harvester or old snapshots."""
    code, findings = run("doctor")
    assert code == 0
    assert not of(findings, "problem")
    assert set(of(findings, "warning")) <= {"leader group", "old snapshot"}
    assert "settled floor" in of(findings, "ok")


def test_tables_without_a_settled_floor_are_told(run, connection):
    """A table whose ids cannot prove a settled floor is a warning, with the reason."""
    connection.execute("CREATE TABLE child () INHERITS (outbox)")
    code, findings = run("doctor")
    assert code == 0
    assert "inherited" in of(findings, "warning")["settled floor"]["detail"]
    assert {"server", "table", "sequence", "cluster", "leader topic"} <= set(of(findings, "ok"))


def test_text_names_what_is_wrong_and_the_remedy(connection, capsys):
    """A sequence with a cache breaks the order: exit code 1, and the remedy shown ends it."""
    connection.execute("ALTER SEQUENCE outbox_id_seq CACHE 20")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM  sequence" in shown
    remedy = next(line.strip() for line in shown.splitlines() if "CACHE 1" in line)
    connection.execute(remedy.removeprefix("-> "))
    assert main(["doctor"]) == 0


def test_remedy_for_missing_storage_parameters_works(connection, run):
    """The remedy gives the table the storage parameters of the DDL."""
    connection.execute(f"ALTER TABLE outbox RESET ({', '.join(STORAGE_PARAMETERS)})")
    connection.execute(of(run("doctor")[1], "warning")["storage"]["remedy"])
    assert "storage" not in of(run("doctor")[1], "warning")


def test_names_who_holds_an_old_snapshot(database, run, monkeypatch):
    """A transaction open for longer than the bound is named by its pid and application."""
    monkeypatch.setattr(postgres_examination, "_OLD_SECONDS", 0)
    with psycopg.connect(database, application_name="slow report") as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM outbox")
        pid = holder.info.backend_pid
        found = of(run("doctor")[1], "warning")["old snapshot"]
    assert f"pid {pid} (slow report)" in found["detail"]


def test_logical_slot_without_a_reader(tmp_path):
    """A logical slot that nobody reads is named with the WAL that it keeps; it keeps no dead row of the outbox."""
    server = Postgres(tmp_path / "logical", small=True)
    try:
        server.start()
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET wal_level = logical")
        server.restart()
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')")
        with DatabaseSession(server.dsn, "outbox", application_name="test") as session:
            (found,) = PostgresChecks(session, CommandLine()).snapshots()
    finally:
        server.stop()
        server.remove()
    assert "slot 'debezium' is not in use and keeps " in found.detail
    assert " of WAL, and more until" in found.detail
    assert "vacuum" not in found.detail


def test_names_every_service_that_is_away_and_no_password(monkeypatch, capsys):
    """The doctor reports both services as unreachable, and does not show the password of the DSN."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", "postgresql://me:s3cret@127.0.0.1:1/db")
    monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    assert main(["doctor", "--json"]) == 5
    findings = json.loads(capsys.readouterr().out)
    assert set(of(findings, "problem")) == {"database", "Kafka"}
    assert "s3cret" not in json.dumps(findings)
    assert "database db at 127.0.0.1:1 as role me" in of(findings, "problem")["database"]["detail"]


def test_pooler_of_transactions_is_a_problem_of_its_own(run, monkeypatch):
    """A pooler that lends its connections for a transaction is told as such, not as a missing right."""
    monkeypatch.setattr("outbox_core.stores.postgres.connection._WHO", "SELECT -1, current_user")
    monkeypatch.setattr("outbox_core.stores.postgres.connection.is_lent_by_transaction", lambda *_: True)
    code, findings = run("doctor")
    told = of(findings, "problem")
    assert code == 1
    assert "pool_mode=transaction" in told["pooler"]["detail"]
    assert "database" not in told


def test_missing_table_is_a_problem(connection, run):
    """A missing table is a problem of the database, and the doctor still examines Kafka."""
    connection.execute("DROP TABLE outbox")
    code, findings = run("doctor")
    assert code == 1
    assert "does not exist" in of(findings, "problem")["table"]["detail"]
    assert "cluster" in of(findings, "ok")


@pytest.mark.real_broker
def test_tracking_topic_that_expires_is_a_problem(kafka_bootstrap, topic_name, run, tmp_path):
    """With the delete policy the last manifest would be lost: exit code 1, and the setting is named."""
    topic = topic_name("tracking")
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    path = tmp_path / "reaper.yaml"
    path.write_text(f"harvest:\n  delivery: exactly-once\n  trackingTopic: {topic}\n")
    code, findings = run("doctor", "-f", str(path))
    assert code == 1
    assert "cleanup.policy=delete" in of(findings, "problem")["tracking topic"]["detail"]


def test_what_is_held_is_told(connection, run, capsys):
    """An outbox without holds is fine; a paused topic and a held record are a warning, and a line of the status."""
    assert "nothing is held" in of(run("doctor")[1], "ok")["holds"]["detail"]
    connection.execute(INSERT, ("orders", 1))
    assert main(["hold", "add", "--topic", "invoices"]) == 0
    assert main(["hold", "add", "--record", "1"]) == 0
    capsys.readouterr()
    code, findings = run("doctor")
    assert code == 0
    assert of(findings, "warning")["holds"]["detail"] == "held: 1 record, topic invoices"
    assert run("status")[1]["held"] == {"records": 1, "keys": 0, "topics": ["invoices"]}
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "by holds of 1 record, topic invoices\n" in shown
    assert "ready    0 records" in shown


def test_holds_that_cannot_be_used_are_told(connection, run, tmp_path):
    """A missing table of holds is a warning, or a problem if bad records go to the dead-letter topic."""
    path = tmp_path / "reaper.yaml"
    path.write_text("harvest:\n  onPoison: dead-letter\n")
    assert "dead-letter topic" in of(run("doctor", "-f", str(path))[1], "ok")
    connection.execute("DROP TABLE outbox_hold")
    code, findings = run("doctor")
    assert code == 0
    assert "there is no table public.outbox_hold" in of(findings, "warning")["holds"]["detail"]
    code, findings = run("doctor", "-f", str(path))
    assert code == 1
    assert "outbox schema --apply -f" in of(findings, "problem")["holds"]["remedy"]


def test_missing_rights_on_holds_are_told(database, connection, run, monkeypatch):
    """A role that may not write holds gets the GRANT to ask for; one that may not read them has a problem."""
    connection.execute("CREATE ROLE reader LOGIN")
    connection.execute("GRANT ALL ON outbox, outbox_id_seq TO reader; GRANT SELECT, INSERT ON outbox_hold TO reader")
    try:
        monkeypatch.setenv("OUTBOX_POSTGRES_DSN", as_role(database, "reader"))
        code, findings = run("doctor")
        assert code == 0
        found = of(findings, "warning")["holds"]
        assert "lacks the right(s) UPDATE, DELETE" in found["detail"]
        assert "GRANT UPDATE, DELETE ON" in found["remedy"]
        assert found["remedy"].endswith('TO "reader"')
        assert "pg_read_all_stats" in of(findings, "ok")["snapshots"]["detail"]
        connection.execute("REVOKE SELECT ON outbox_hold FROM reader")
        code, findings = run("doctor")
        assert code == 1
        assert "lacks the right(s) SELECT" in of(findings, "problem")["holds"]["detail"]
        assert of(findings, "problem")["holds"]["remedy"].endswith('TO "reader"')
    finally:
        connection.execute("DROP OWNED BY reader; DROP ROLE reader")


def test_missing_topic_is_named(connection, run, topic_name):
    """Records that wait for a topic that does not exist are a warning."""
    topic = topic_name("nobody-made")
    connection.execute(INSERT, (topic, 3))
    assert topic in of(run("doctor")[1], "warning")["topic"]["detail"]


@pytest.mark.parametrize("topic", ["orders; rm -rf ~", "__consumer_offsets"])
def test_topic_that_no_record_can_have(connection, run, topic):
    """A name that the harvester refuses is told as such, and comes into no command."""
    connection.execute(INSERT, (topic, 3))
    found = of(run("doctor")[1], "warning")["topic"]
    assert found["detail"].startswith(f"records wait for a topic that records cannot have: {topic!r} is ")
    assert found["remedy"] == ("correct kafka_topic of their rows and release them, or skip them: `outbox hold list`")


def test_status_shows_what_waits_and_who_leads(connection, run, topic_name, capsys):
    """The status shows the backlog by topic; without a harvester its list of harvesters is empty."""
    topic = topic_name("waiting")
    connection.execute(INSERT, (topic, 1200))
    code, status = run("status")
    assert code == 0
    assert (status["pending"], status["harvesters"]) == (1200, [])
    assert [(one["topic"], one["waiting"], one["marked"], one["held"]) for one in status["topics"]] == [
        (topic, 1200, 0, 0)
    ]
    assert status["oldest_age_seconds"] > 0
    assert main(["status"]) == 0
    assert "waiting  1,200 records" in capsys.readouterr().out


def test_status_names_the_leader(database, kafka_bootstrap, run):
    """The status shows a running harvester by its name, as the leader."""
    config = HarvestConfig(
        data_source=database, base_kafka_config={"bootstrap.servers": kafka_bootstrap}, name="harvester-of-status"
    )
    with Harvester(config) as harvester:
        wait_until(lambda: harvester.is_leader, "leadership")
        status = run("status")[1]
    assert [(each["client_id"], each["leads"]) for each in status["harvesters"]] == [("harvester-of-status", True)]


def test_doctor_warns_of_records_that_a_leader_leaves(connection, database, kafka_bootstrap, run):
    """Records of more than 30 s that nothing holds, beside a leader, are a warning that says where to look."""
    kafka = {"bootstrap.servers": kafka_bootstrap}
    config = HarvestConfig(data_source=database, base_kafka_config=kafka, name="idle-one")
    identity = f"{connection.info.dbname}.public.outbox"
    ((server,),) = connection.execute("SELECT system_identifier::text FROM pg_control_system()").fetchall()
    late = "INSERT INTO outbox (kafka_topic, create_time) VALUES (%s, now() - interval '40 s')"
    with Neli(NeliConfig.of(config, identity, server)) as idle:
        wait_until(lambda: idle.is_leader, "leadership")
        connection.execute(INSERT, ("fresh", 3))
        connection.execute(late, ("paused",))
        connection.execute("INSERT INTO outbox_hold (outbox, kafka_topic) VALUES ('public.outbox', 'paused')")
        assert "delay" not in of(run("doctor")[1], "warning")
        connection.execute(late, ("late",))
        finding = of(run("doctor")[1], "warning")["delay"]
    assert "have waited for " in finding["detail"]
    assert "idle-one leads" in finding["detail"]
    assert "/healthz" in finding["remedy"]


def test_doctor_sees_who_leads(database, kafka_bootstrap, run):
    """The doctor names the leader; a leader of an equally named outbox of another server is a problem naming both."""
    kafka = {"bootstrap.servers": kafka_bootstrap}
    assert "leader" not in of(run("doctor")[1], "ok")
    config = HarvestConfig(data_source=database, base_kafka_config=kafka, name="harvester-of-doctor")
    with Harvester(config) as harvester:
        wait_until(lambda: harvester.is_leader, "leadership")
        assert "harvester-of-doctor leads" in of(run("doctor")[1], "ok")["leader"]["detail"]
    identity = f"{database.rpartition('/')[2].partition('?')[0]}.public.outbox"
    with Neli(NeliConfig.of(config, identity, "7300000000000000002")) as twin:
        wait_until(lambda: twin.is_leader, "leadership")
        code, findings = run("doctor")
    assert code == 1
    found = of(findings, "problem")["leader"]
    assert f"for {identity} on database server 7300000000000000002, and this is {identity} on" in found["detail"]
    assert "leaderGroupID" in found["remedy"]


@pytest.mark.django_db(transaction=True)
def test_django_commands_look_at_the_database_of_the_settings(kafka_bootstrap, settings):
    """`manage.py outbox_status` and `outbox_doctor` print to the stream that Django gives them."""
    settings.OUTBOX = {**getattr(settings, "OUTBOX", {}), "KAFKA": {"bootstrap.servers": kafka_bootstrap}}
    out = StringIO()
    call_command("outbox_status", "--json", stdout=out)
    assert json.loads(out.getvalue())["pending"] == 0
    out = StringIO()
    call_command("outbox_doctor", stdout=out)
    assert "sequence" in out.getvalue()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_remedies_lead_to_the_database_of_the_settings(kafka_bootstrap, settings):
    """A remedy names the alias for `manage.py migrate` if OUTBOX["DATABASE"] is another than `default`."""
    kafka = {"bootstrap.servers": kafka_bootstrap}
    settings.OUTBOX = {"KAFKA": kafka, "DATABASE": "other", "TABLE": "absent"}
    out = StringIO()
    with pytest.raises(SystemExit):
        call_command("outbox_doctor", stdout=out)
    assert "`manage.py migrate outbox_django --database other`" in " ".join(out.getvalue().split())


def test_notify_without_its_trigger(run, connection, monkeypatch):
    """With `notify` on, a missing trigger is a warning; with the trigger, the doctor sees that notices arrive."""
    assert "notices" not in of(run("doctor")[1], "ok")
    monkeypatch.setenv("OUTBOX_NOTIFY", "true")
    assert "`outbox schema --apply --notify`" in of(run("doctor")[1], "warning")["notices"]["remedy"]
    connection.execute(notify_sql(TableName("outbox")))
    assert "notices" in of(run("doctor")[1], "ok")


def test_remedy_for_missing_constraints_works(connection, run):
    """The remedies add the constraints to an older table, and then validate them."""
    connection.execute(drop_checks_sql(TableName("outbox")))
    connection.execute("INSERT INTO outbox (kafka_topic, kafka_partition) VALUES ('t', -5)")
    found = of(run("doctor")[1], "warning")
    assert "outbox_partition_in_range" in found["constraints"]["detail"]
    assert "kafka_partition >= 0" in found["rows"]["remedy"]
    assert connection.execute(found["rows"]["remedy"]).fetchall()
    assert "`outbox schema --apply --only checks`" in found["constraints"]["remedy"]
    connection.execute(add_checks_sql(TableName("outbox")))
    found = of(run("doctor")[1], "warning")
    assert "not validated" in found["constraints"]["detail"]
    connection.execute("DELETE FROM outbox")
    connection.execute(found["constraints"]["remedy"])
    findings = run("doctor")[1]
    assert not {"constraints", "rows"} & set(of(findings, "warning"))
    assert "constraints" in of(findings, "ok")


def test_writers_with_rights_beyond_their_columns(connection, run, topic_name):
    """The doctor names a role that may insert ids, times and marks, and the grant in the remedy suffices for it."""
    role = topic_name("writer")
    connection.execute(f'CREATE ROLE "{role}"; GRANT INSERT ON outbox TO "{role}"')
    try:
        found = of(run("doctor")[1], "warning")["writers"]
        assert role in found["detail"]
        assert "id and leader_id and create_time" in found["detail"]
        connection.execute(found["remedy"])
        assert "writers" not in of(run("doctor")[1], "warning")
        connection.execute(f"SET ROLE \"{role}\"; INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k')")
        connection.execute("RESET ROLE")
        connection.execute(f'GRANT INSERT (leader_id) ON outbox TO "{role}"')
        assert "may insert leader_id," in of(run("doctor")[1], "warning")["writers"]["detail"]
    finally:
        connection.execute(f'RESET ROLE; DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_everybody_may_create_in_the_schema(connection, run):
    """A schema in which every role may create objects is a warning, and the statement in its remedy ends it."""
    connection.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    connection.execute(of(run("doctor")[1], "warning")["schema"]["remedy"])
    assert "schema" not in of(run("doctor")[1], "warning")


@pytest.mark.parametrize(
    "case",
    [
        ("ALTER TABLE outbox ALTER create_time DROP NOT NULL", "create_time", "may be NULL"),
        ("ALTER TABLE outbox ALTER create_time DROP DEFAULT", "create_time", "has no DEFAULT"),
        ("INSERT INTO outbox (id, kafka_topic) VALUES (4000, 't'); SELECT nextval('outbox_id_seq')", "rows", "id 4000"),
        ("INSERT INTO outbox (kafka_topic, leader_id) VALUES ('t', gen_random_uuid())", "rows", "carry a mark"),
        (
            """CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
            CREATE TRIGGER soft_delete BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()""",
            "obstacle",
            "trigger soft_delete",
        ),
    ],
    ids=["null", "no-default", "id-ahead", "mark", "trigger"],
)
def test_what_may_go_wrong_in_the_table(connection, run, monkeypatch, case):
    """Columns, rows and triggers that the library's own DDL would not make are named, each with a remedy."""
    statements, subject, told = case
    connection.execute(statements)
    monkeypatch.setenv("OUTBOX_DELIVERY", "exactly-once")
    found = of(run("doctor")[1], "warning")[subject]
    assert told in found["detail"]
    assert found["remedy"]
    if found["remedy"].startswith(("ALTER", "SELECT setval")):
        connection.execute(found["remedy"])
        assert subject not in of(run("doctor")[1], "warning")


def test_row_security_without_a_policy_is_a_problem(database, connection, run, monkeypatch, topic_name):
    """A role to which row security applies could delete no row, and would publish for ever: that is a problem."""
    role = topic_name("harvester")
    connection.execute(f'CREATE ROLE "{role}" LOGIN; GRANT ALL ON outbox, outbox_hold TO "{role}"')
    connection.execute("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", as_role(database, role))
    try:
        code, findings = run("doctor")
        assert code == 1
        assert "row level security" in of(findings, "problem")["row security"]["detail"]
        assert "DISABLE ROW LEVEL SECURITY" in of(findings, "problem")["row security"]["remedy"]
        connection.execute("CREATE POLICY tenants ON outbox USING (id = 1)")
        assert f'ALTER ROLE "{role}" BYPASSRLS' in of(run("doctor")[1], "problem")["row security"]["remedy"]
        connection.execute("ALTER POLICY tenants ON outbox USING (true)")
        _, findings = run("doctor")
        assert "row security" not in of(findings, "problem")
        assert "hide nothing" in of(findings, "ok")["row security"]["detail"]
        connection.execute("ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
    finally:
        connection.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_row_security_of_the_tables_beside(database, connection, run, monkeypatch, topic_name):
    """Row level security on holds is a problem, on history and inbox a warning, each with a statement that mends it."""
    role = topic_name("harvester")
    connection.execute(f'CREATE ROLE "{role}" LOGIN; GRANT ALL ON outbox, outbox_hold TO "{role}"')
    connection.execute(create_inbox_sql(TableName("inbox")))
    connection.execute(create_history_sql(TableName("outbox")))
    connection.execute(f'GRANT ALL ON outbox_statistics TO "{role}"')
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", as_role(database, role))
    try:
        for table, verdict in {"outbox_hold": "problem", "outbox_event": "warning", "inbox": "warning"}.items():
            connection.execute(f'GRANT ALL ON {table} TO "{role}"; ALTER TABLE {table} ENABLE ROW LEVEL SECURITY')
            _, findings = run("doctor")
            subject = "history" if table == "outbox_event" else "row security"
            assert table in of(findings, verdict)[subject]["detail"]
            connection.execute(of(findings, verdict)[subject]["remedy"])
            assert subject not in of(run("doctor")[1], verdict)
    finally:
        connection.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.fixture
def forbid(kafka_bootstrap):
    """Return `forbid(kind, name, operation)`, which denies an operation to every user until the test ends."""
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    made = []

    def forbid(kind, name, *operations, principal="User:*", permission=AclPermissionType.DENY):
        for operation in operations:
            acl = AclBinding(kind, name, ResourcePatternType.LITERAL, principal, "*", operation, permission)
            made.append(acl)
            admin.create_acls([acl])[acl].result(15)

    yield forbid
    for acl in made:
        what = acl.restype, acl.name, acl.resource_pattern_type, acl.principal, acl.host, acl.operation
        admin.delete_acls([AclBindingFilter(*what, acl.permission_type)])


@pytest.fixture
def names(database, kafka_bootstrap, monkeypatch, topic_name):
    """Names of exactly-once delivery: group, leader topic, tracking topics and transactional.id; both topics exist."""
    group = topic_name("group")
    monkeypatch.setenv("OUTBOX_DELIVERY", "exactly-once")
    monkeypatch.setenv("OUTBOX_LEADER_GROUP_ID", group)
    config = HarvestConfig(data_source=database, leader_group_id=group)
    identity = f"{database.rpartition('/')[2].partition('?')[0]}.public.outbox"
    tracking = config.tracking_names(identity)
    leader_topic = config.leader_names(identity).topic
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    for topic, settings in ((leader_topic, {}), (tracking.topic, {"cleanup.policy": "compact"})):
        admin.create_topics([NewTopic(topic, 1, config=settings)])[topic].result(15)
    return {
        "group": group,
        "leader": leader_topic,
        "tracking": tracking.topic,
        "relay": tracking.relay_topic,
        "id": tracking.transactional_id,
    }


_TOPIC, _GROUP, _ID = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID


@pytest.mark.real_broker
def test_rights_of_the_next_start(names, forbid, run):
    """The doctor names each right that the next start lacks, and the resource that needs it."""
    assert not of(run("doctor")[1], "problem")
    missing = [
        (_TOPIC, "leader", AclOperation.WRITE, "leader topic"),
        (_TOPIC, "tracking", AclOperation.READ, "tracking topic"),
        (_TOPIC, "relay", AclOperation.DESCRIBE, "relay's topic"),
        (_GROUP, "group", AclOperation.READ, "leader group"),
        (_ID, "id", AclOperation.WRITE, "transactional.id"),
    ]
    for kind, which, operation, _ in missing:
        forbid(kind, names[which], operation)
    problems = wait_until(
        lambda: len(found := of(run("doctor")[1], "problem")) == len(missing) and found, "the ACLs are in force", 15
    )
    for _, which, _, subject in missing:
        assert names[which] in problems[subject]["detail"] + problems[subject]["remedy"]
        assert "grant" in problems[subject]["remedy"]


@pytest.mark.real_broker
def test_a_transaction_goes_on_while_the_doctor_looks(names, run, kafka_bootstrap, make_topic):
    """The doctor tries the transactional.id without effect: an open transaction is not fenced, and commits."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": names["id"]})
    producer.init_transactions(15)
    producer.begin_transaction()
    producer.produce(topic, b"before")
    producer.flush(10)
    assert "may be used" in of(run("doctor")[1], "ok")["transactional.id"]["detail"]
    producer.produce(topic, b"after")
    producer.commit_transaction(15)
    assert [message.value for message in read_topic(kafka_bootstrap, topic)] == [b"before", b"after"]


@pytest.mark.real_broker
def test_topics_that_take_nothing(names, run, kafka_bootstrap):
    """Settings with which a topic refuses the harvester's records are problems, and the findings name them."""
    refusing = {"cleanup.policy": "compact", "max.message.bytes": "300", "min.insync.replicas": "2"}
    for which, settings in (("leader", refusing), ("tracking", {"max.message.bytes": "4096"})):
        alter_topic(kafka_bootstrap, names[which], settings)
    findings = run("doctor")[1]
    assert "tracking topic" in of(findings, "problem")
    details = "; ".join(found["detail"] for found in findings if found["verdict"] == "problem" and found["remedy"])
    for told in ("cleanup.policy=compact", "300 bytes only", "4,096 bytes only"):
        assert told in details
    warned = "; ".join(found["detail"] for found in findings if found["verdict"] == "warning")
    assert "min.insync.replicas=2" in warned  # current brokers take records all the same


@pytest.mark.real_broker
def test_others_who_may_write_control_topics(names, forbid, run):
    """The doctor names principals that ACLs allow to write to the tracking topic."""
    assert "ACLs" in of(run("doctor")[1], "ok")
    allow = {"permission": AclPermissionType.ALLOW}
    forbid(_TOPIC, names["tracking"], AclOperation.ALL, principal="User:harvester", **allow)
    forbid(_TOPIC, names["tracking"], AclOperation.WRITE, principal="User:shop", **allow)
    forbid(_TOPIC, names["tracking"], AclOperation.ALL, principal="User:ANONYMOUS", **allow)
    found = wait_until(lambda: of(run("doctor")[1], "warning").get("ACLs"), "the ACLs have come to the broker", 15)
    assert "User:shop" in found["detail"]
    assert names["tracking"] in found["detail"]


@pytest.mark.real_broker
def test_a_group_of_other_programs(names, run, kafka_bootstrap):
    """If other programs use the group, the remedy is to stop them first and wait, never to name another group."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka_bootstrap,
            "group.id": names["group"],
            "partition.assignment.strategy": "range",
        }
    )
    consumer.subscribe([names["leader"]])
    try:
        wait_until(lambda: consumer.poll(0.2) is None and consumer.assignment(), "it has joined", 30)
        found = of(run("doctor")[1], "problem")["leader group"]
    finally:
        consumer.close()
    assert "range" in found["detail"]
    assert "stop them first" in found["remedy"]
    assert "three heartbeatTimeouts" in found["remedy"]
    assert "Never name another leader_group_id" in found["remedy"]
