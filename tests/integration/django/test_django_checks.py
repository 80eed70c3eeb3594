"""The OUTBOX setting as a typed value, and the system checks that report its mistakes."""

from datetime import timedelta

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.db.migrations.recorder import MigrationRecorder

from outbox_core.errors import InvalidConfig
from outbox_core.schema import TEXT_LAYOUT, TableName, create_hold_sql, create_table_sql
from outbox_django.settings import OutboxSettings, model_table, outbox_settings
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

_SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}


class _ToNowhere:
    def db_for_write(self, model, **_):
        return "nowhere" if model._meta.app_label == "outbox_django" else None


def _ids(databases=None):
    return [message.id for message in _messages(databases)]


def _messages(databases=None):
    return [found for found in run_checks(databases=databases) if str(found.id).startswith("outbox_django.")]


def test_no_setting_is_all_defaults(settings):
    """A project without OUTBOX has an outbox named `outbox` where the routers say."""
    del settings.OUTBOX
    assert outbox_settings() == OutboxSettings()
    assert (outbox_settings().table, outbox_settings().database) == (TableName("outbox"), None)
    assert _ids() == []


def test_every_key_is_read(settings):
    """Each key has its place in the typed settings."""
    settings.OUTBOX = {
        "DATABASE": "other",
        "TABLE": "billing.outbox",
        "LAYOUT": "text",
        "KAFKA": {"bootstrap.servers": "localhost:9092", "retries": 3, "oauth_cb": print},
        "PRODUCER_KAFKA": {"linger.ms": 5, "enable.idempotence": True},
        "LEADER_TOPIC": "leaders",
        "LEADER_GROUP_ID": "harvesters",
        "NAME": "a",
        "OUTBOX_NAME": "billing",
        "ID_HEADER": "",
        "LIMITS": {"heartbeat_timeout": timedelta(seconds=5), "mark_backoff": "20ms", "max_in_flight_records": 100},
        "METRICS_HOST": "0.0.0.0",  # noqa: S104
        "METRICS_PORT": 9100,
    }
    current = outbox_settings()
    assert (current.table, current.table_layout) == (TableName("outbox", "billing"), TEXT_LAYOUT)
    assert current.limits["mark_backoff"] == "20ms"
    assert current.id_header == ""
    assert _ids() == []


def test_settings_are_read_only(settings):
    """Neither the value nor its dicts can be changed, and a change of the raw dict does not change them."""
    raw = {"bootstrap.servers": "a"}
    settings.OUTBOX = {"KAFKA": raw}
    current = outbox_settings()
    raw["bootstrap.servers"] = "b"
    assert current.kafka == {"bootstrap.servers": "a"}
    with pytest.raises(TypeError):
        current.kafka["x"] = "y"
    with pytest.raises(AttributeError):
        current.name = "x"


@pytest.mark.parametrize(
    ("outbox", "number", "said"),
    [
        (["DATABASE"], "E001", "OUTBOX must be a dict, got list"),
        ({"TABEL": "outbox"}, "E002", "OUTBOX['TABEL'] is no setting. Did you mean 'TABLE'?"),
        ({"kafka": {}}, "E002", "Did you mean 'KAFKA'?"),
        ({"zzz": 1}, "E002", "The keys are DATABASE, DIRECT_DATABASE, TABLE"),
        ({1: 2}, "E002", "OUTBOX[1] is no setting"),
        ({"DATABASE": None}, "E003", "OUTBOX['DATABASE']: expected a non-empty str, got None"),
        ({"TABLE": "a.b.c"}, "E003", "OUTBOX['TABLE']: 'a.b.c' is not a table name"),
        ({"TABLE": 7}, "E003", "OUTBOX['TABLE']"),
        ({"LAYOUT": "json"}, "E003", "expected 'binary' or 'text', got 'json'"),
        ({"KAFKA": "localhost:9092"}, "E003", "OUTBOX['KAFKA']: expected a dict, got str"),
        ({"KAFKA": {"ssl": {"ca": "x"}}}, "E003", "OUTBOX['KAFKA']: 'ssl': expected a str, number or bool, got dict"),
        ({"PRODUCER_KAFKA": {1: "x"}}, "E003", "the name of a librdkafka setting must be a str, got 1"),
        ({"LIMITS": {"heartbeat_timeout": [5]}}, "E003", "OUTBOX['LIMITS']: 'heartbeat_timeout'"),
        ({"ID_HEADER": None}, "E003", "OUTBOX['ID_HEADER']: expected a str, got None"),
        ({"METRICS_PORT": "9100"}, "E003", "OUTBOX['METRICS_PORT']: expected a port number"),
        ({"METRICS_PORT": 70000}, "E003", "OUTBOX['METRICS_PORT']"),
        (
            {"DATABASE": "postgresql://me:hunter2@db/shop"},
            "E003",
            "expected an alias of DATABASES, got a connection string",
        ),
        ({"DATABASE": "nowhere"}, "E004", "OUTBOX['DATABASE'] is 'nowhere', which is no alias of DATABASES."),
        ({"DIRECT_DATABASE": "nowhere"}, "E004", "OUTBOX['DIRECT_DATABASE'] is 'nowhere', which is no alias"),
    ],
)
def test_what_is_wrong_is_named(settings, outbox, number, said):
    """A wrong setting is one error that names the key, and the nearest legal one where there is one."""
    settings.OUTBOX = outbox
    (error,) = _messages()
    assert error.id == f"outbox_django.{number}"
    assert said in f"{error.msg} {error.hint}"
    if number != "E004":
        with pytest.raises(InvalidConfig) as raised:
            outbox_settings()
        assert str(raised.value) == " ".join(text for text in (error.msg, error.hint) if text)


def test_all_problems_are_reported_at_once(settings):
    """Several wrong keys are several errors of one run."""
    settings.OUTBOX = {"TABEL": "x", "LAYOUT": "json", "KAFKA": 5}
    assert sorted(_ids()) == ["outbox_django.E002", "outbox_django.E003", "outbox_django.E003"]


def test_a_wrong_setting_does_not_stop_django_from_starting(settings):
    """The model falls back to the default table, so that the check can report the mistake."""
    for wrong in ("outbox", {"TABLE": "a.b.c"}, {"TABLE": None}):
        settings.OUTBOX = wrong
        assert model_table() == "outbox"


def test_a_secret_is_not_shown(settings):
    """An error about a Kafka setting does not repeat its value."""
    settings.OUTBOX = {"KAFKA": {"sasl.password": ["hunter2"]}}
    (error,) = _messages()
    assert "sasl.password" in error.msg
    assert "hunter2" not in error.msg


def test_a_router_that_names_no_database(settings):
    """An alias that only a router knows is reported like one that the setting names."""
    settings.DATABASE_ROUTERS = [_ToNowhere()]
    (error,) = _messages()
    assert error.id == "outbox_django.E004"
    assert "'nowhere'" in error.msg


def test_the_database_must_be_postgresql(settings, monkeypatch):
    """An outbox on SQLite is an error before the first stash."""
    monkeypatch.setitem(connections.settings, "lite", {**connections.settings["default"], **_SQLITE})
    settings.OUTBOX = {"DATABASE": "lite"}
    assert _ids() == ["outbox_django.E005"]


@pytest.mark.parametrize(
    ("outbox", "said"),
    [
        ({"LIMITS": {"heartbeat_timout": "5s"}}, "OUTBOX['LIMITS']['heartbeat_timout']"),
        ({"LIMITS": {"heartbeat_timeout": 5}}, "write `5s` for seconds"),
        ({"LEADER_TOPIC": "no topic"}, "OUTBOX['LEADER_TOPIC']: is not a topic name"),
        ({"PRODUCER_KAFKA": {"acks": 1}}, "OUTBOX['PRODUCER_KAFKA']['acks']: must be `all`"),
    ],
)
def test_settings_that_the_harvester_refuses(settings, outbox, said):
    """A setting that HarvestConfig refuses is an error of the check, under its key in OUTBOX."""
    settings.OUTBOX = {"KAFKA": {"bootstrap.servers": "localhost:9092"}, **outbox}
    (error,) = _messages()
    assert error.id == "outbox_django.E006"
    assert said in error.msg


def test_all_mistakes_are_told_at_once(settings):
    """Mistakes of OUTBOX hide none of those that only the harvester finds; a command tells them in a line each."""
    settings.OUTBOX = {"KAFK": {}, "METRICS_PORT": "x", "KAFKA": {"acks": 1}, "LIMITS": {"mark_query_records": 0}}
    found = ["outbox_django.E002", "outbox_django.E003", "outbox_django.E006", "outbox_django.E006"]
    assert sorted(_ids()) == found
    with pytest.raises(CommandError) as raised:
        call_command("run_harvester")
    assert str(raised.value).splitlines() == [
        "OUTBOX['KAFK'] is no setting. Did you mean 'KAFKA'?",
        "OUTBOX['METRICS_PORT']: expected a port number from 0 to 65535 or None, got 'x'",
    ]


def test_options_are_named_as_options(settings):
    """A mistake in an option of a command has the option's name, one in OUTBOX the key's."""
    settings.OUTBOX = {"KAFKA": {"acks": 1}, "LEADER_TOPIC": "no topic"}
    with pytest.raises(CommandError) as raised:
        call_command("run_harvester", "--table", "a.b.c", "-X", "enable.idempotence=false")
    assert [line.partition(": ")[0] for line in str(raised.value).splitlines()] == [
        "OUTBOX['KAFKA']['acks']",
        "-X enable.idempotence",
        "OUTBOX['LEADER_TOPIC']",
        "--table",
    ]


def test_without_kafka_settings_the_harvester_is_not_checked(settings):
    """The settings of the harvester are not checked in a project without Kafka settings."""
    settings.OUTBOX = {"LEADER_TOPIC": "no topic"}
    assert _ids() == []


@pytest.mark.django_db(databases=["default", "other"])
def test_the_migrated_table_is_clean():
    """`check --database` reports no problem of the table that the migration makes."""
    assert _ids(["default", "other"]) == []
    call_command("check", tags=["database"], databases=["default"], fail_level="WARNING")


@pytest.mark.django_db(databases=["default", "other"])
def test_a_missing_table_is_a_warning_where_stash_writes(settings, monkeypatch):
    """A missing table is a warning (migrate must pass), on the outbox's own database alone."""
    settings.OUTBOX = {"TABLE": "absent"}
    assert _ids(["default"]) == ["outbox_django.W001"]
    with monkeypatch.context() as first_time:
        first_time.setattr("sys.argv", ["manage.py", "migrate"])
        first_time.setattr(MigrationRecorder, "applied_migrations", lambda _: {})
        assert _ids(["default"]) == [], "it is about to be made"
    assert _ids(["other"]) == []
    settings.OUTBOX = {"TABLE": "absent", "DATABASE": "other"}
    (missing,) = _messages(["other"])
    assert missing.hint == "Run `manage.py migrate --database other`."


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("ddl", "outbox", "expected", "said"),
    [
        ("CREATE TABLE mine (id int)", {}, "E007", "mine in database 'default' is no outbox: it lacks create_time"),
        (create_table_sql(TableName("mine"), "text"), {"LAYOUT": "text"}, "W003", "kafka_partition"),
        (
            create_table_sql(TableName("mine")) + "ALTER TABLE mine DROP COLUMN kafka_partition",
            {},
            "E007",
            "it lacks kafka_partition",
        ),
        (create_table_sql(TableName("mine")), {"LAYOUT": "text"}, "E007", "has the binary layout"),
        (
            create_table_sql(TableName("mine")) + "ALTER TABLE mine ALTER COLUMN create_time DROP DEFAULT",
            {},
            "W006",
            "create_time",
        ),
        (
            create_table_sql(TableName("mine")) + "ALTER TABLE mine ALTER COLUMN id SET CACHE 20",
            {},
            "W002",
            "CACHE 20",
        ),
    ],
)
def test_a_table_that_is_not_right(settings, ddl, outbox, expected, said):
    """The database check names the fault of the table."""
    with connection.cursor() as cursor:
        cursor.execute(ddl)
        cursor.execute(create_hold_sql(TableName("mine")))
    settings.OUTBOX = {"TABLE": "mine", **outbox}
    (message,) = _messages(["default"])
    assert message.id == f"outbox_django.{expected}"
    assert said in message.msg


@pytest.mark.django_db
def test_a_missing_table_of_holds_is_a_warning(settings):
    """A missing table of holds is a warning that names it."""
    with connection.cursor() as cursor:
        cursor.execute(create_table_sql(TableName("mine")))
    settings.OUTBOX = {"TABLE": "mine"}
    (warning,) = _messages(["default"])
    assert (warning.id, "no table mine_hold" in warning.msg) == ("outbox_django.W005", True)


@pytest.mark.django_db
def test_the_hint_for_a_caching_sequence_can_be_run(settings):
    """The statement in the hint ends the warning, for a serial column as well."""
    with connection.cursor() as cursor:
        cursor.execute(create_table_sql(TableName("Mine", "public"), "text"))
        cursor.execute(create_hold_sql(TableName("Mine", "public")))
        cursor.execute('ALTER TABLE "Mine" ADD COLUMN kafka_partition integer')
        cursor.execute('ALTER SEQUENCE "Mine_id_seq" CACHE 10')
        settings.OUTBOX = {"TABLE": "public.Mine", "LAYOUT": "text"}
        (warning,) = _messages(["default"])
        assert warning.id == "outbox_django.W002"
        cursor.execute(warning.hint)
    assert _ids(["default"]) == []
