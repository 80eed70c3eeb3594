"""`manage.py run_harvester`: Django's settings become the harvester's, and each error is one line."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psycopg
import pytest
from django.core.management import CommandError, call_command, execute_from_command_line
from django.db import connections
from psycopg.conninfo import conninfo_to_dict

from outbox_core.errors import InvalidConfig
from outbox_django.databases import direct_alias, option_of, write_alias
from outbox_django.harvesting import data_source, harvest_config
from outbox_django.management.commands import outbox_peek
from outbox_django.settings import outbox_settings
from tests.integration.django.django_fixtures import django_db_modify_db_settings
from tests.kafka_reader import read_topic

__all__ = ["django_db_modify_db_settings"]

_PROJECT = """
import os, sys
from django.conf import settings
from django.core.management import execute_from_command_line
from psycopg.conninfo import conninfo_to_dict

server = conninfo_to_dict(os.environ["TEST_DATABASE"])
settings.configure(
    INSTALLED_APPS=["outbox_django"],
    OUTBOX={"TABLE": "billing.outbox", "KAFKA": {"bootstrap.servers": os.environ["TEST_KAFKA"]}},
    USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": server["dbname"],
                           "USER": server["user"], "PASSWORD": server.get("password", ""),
                           "HOST": server["host"], "PORT": server["port"]}},
)
if sys.argv[1] == "stash":
    import django
    from django.db import transaction
    django.setup()
    import outbox_django as outbox
    with transaction.atomic():
        outbox.stash_many(outbox.OutboxRecord(sys.argv[2], key=n % 7, value={"n": n}) for n in range(500))
else:
    execute_from_command_line(sys.argv)
"""


@pytest.fixture
def alias(monkeypatch):
    """Return a function that makes an alias: `alias(NAME="shop", ...)` returns its name."""

    def make(**database):
        described = {**connections.settings["default"], "HOST": "", "PORT": "", "USER": "", "PASSWORD": "", **database}
        monkeypatch.setitem(connections.settings, "made", described)
        return "made"

    yield make
    if hasattr(connections._connections, "made"):
        assert connections["made"].connection is None, "a connection of Django's was opened"
        del connections["made"]


@pytest.fixture
def started(monkeypatch):
    """The (config, drain) of each harvester that was run; each ends at once with `started.code`."""

    class Started(list):
        code = 0

    calls = Started()

    def run(config, *, tell, drain=False):
        assert callable(tell)
        calls.append((config, drain))
        return calls.code

    monkeypatch.setattr("outbox_django.management.commands.run_harvester.run", run)
    return calls


@pytest.mark.parametrize(
    ("database", "expected"),
    [
        (
            {"NAME": "shop", "HOST": "db.example", "PORT": 5433, "USER": "app", "PASSWORD": "it's a \\ secret"},
            {
                "dbname": "shop",
                "host": "db.example",
                "port": "5433",
                "user": "app",
                "password": "it's a \\ secret",
            },
        ),
        ({"NAME": "shop", "HOST": "/var/run/postgresql"}, {"dbname": "shop", "host": "/var/run/postgresql"}),
        (
            {"NAME": "shop", "OPTIONS": {"sslmode": "verify-full", "sslrootcert": "/etc/my ca.pem", "passfile": "/p"}},
            {"dbname": "shop", "sslmode": "verify-full", "sslrootcert": "/etc/my ca.pem", "passfile": "/p"},
        ),
        ({"NAME": "", "OPTIONS": {"service": "shop"}}, {"service": "shop"}),
        (
            {
                "NAME": "shop",
                "OPTIONS": {
                    "pool": True,
                    "server_side_binding": True,
                    "isolation_level": 3,
                    "prepare_threshold": 5,
                    "application_name": "shop-web",
                    "connect_timeout": 3,
                },
            },
            {"dbname": "shop", "connect_timeout": "3"},
        ),
        (
            {"NAME": "shop", "OPTIONS": {"assume_role": "out box", "options": "-c lock_timeout=5s"}},
            {"dbname": "shop", "options": "-c lock_timeout=5s -c role=out\\ box"},
        ),
    ],
)
def test_the_database_of_an_alias(alias, database, expected):
    """A Django database becomes the connection string of the same database, without Django's own options."""
    assert conninfo_to_dict(data_source(alias(**database))) == expected


def test_the_role_is_assumed(alias, database):
    """Django's `assume_role` holds for the harvester's connection as well, whatever the role's name."""
    server = conninfo_to_dict(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute('CREATE ROLE "out box"')
        try:
            names = {"NAME": "dbname", "HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
            named = {key: server.get(name, "") for key, name in names.items()}
            source = data_source(alias(**named, OPTIONS={"assume_role": "out box"}))
            with psycopg.connect(source) as harvester:
                assert harvester.execute("SELECT current_user").fetchone() == ("out box",)
        finally:
            connection.execute('DROP ROLE "out box"')


@pytest.mark.parametrize(
    ("database", "said"),
    [
        ({"NAME": ""}, "DATABASES\\['made'\\]: .*NAME"),
        ({"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}, "'made' is sqlite"),
    ],
)
def test_a_database_that_cannot_be_harvested(alias, database, said):
    """An incomplete alias, or one of another kind of database, is an error that names it."""
    with pytest.raises(InvalidConfig, match=said):
        data_source(alias(**database))


def test_every_setting_arrives(alias, settings):
    """OUTBOX becomes HarvestConfig, field by field."""
    settings.OUTBOX = {
        "TABLE": "billing.Outbox",
        "KAFKA": {"bootstrap.servers": "kafka:9092", "security.protocol": "ssl"},
        "PRODUCER_KAFKA": {"compression.type": "lz4"},
        "LEADER_TOPIC": "leaders",
        "LEADER_GROUP_ID": "group",
        "NAME": "me",
        "OUTBOX_NAME": "billing",
        "ID_HEADER": "",
        "LIMITS": {"heartbeat_timeout": timedelta(seconds=7), "max_in_flight_records": 100},
        "METRICS_HOST": "::1",
        "METRICS_PORT": 0,
    }
    config = harvest_config(outbox_settings(), alias(NAME="shop"))
    assert config.base_kafka_config == {"bootstrap.servers": "kafka:9092", "security.protocol": "ssl"}
    assert config.producer_kafka_config == {"compression.type": "lz4"}
    assert (config.leader_topic, config.leader_group_id, config.name) == ("leaders", "group", "me")
    assert (config.outbox_table, config.outbox_name, config.id_header) == ('"billing"."Outbox"', "billing", "")
    assert (config.limits.heartbeat_timeout, config.limits.max_in_flight_records) == (timedelta(seconds=7), 100)
    assert (config.metrics_host, config.metrics_port) == ("::1", 0)


def test_the_command_runs_the_harvester(alias, settings, started):
    """`run_harvester` hands the configuration to the core and opens no connection of Django's."""
    settings.OUTBOX = {"DATABASE": alias(NAME="shop"), "KAFKA": {"bootstrap.servers": "kafka:9092"}}
    call_command("run_harvester")
    ((config, drain),) = started
    assert (config.data_source, config.outbox_table, drain) == ("dbname=shop", '"outbox"', False)


def test_the_direct_way_to_the_database(alias, settings, started):
    """Behind a pooler of transactions harvester, commands and console take the direct alias, if no other is given."""
    direct, applications = alias(NAME="direct"), "default"
    settings.OUTBOX = {"DIRECT_DATABASE": direct, "KAFKA": {"bootstrap.servers": "kafka:9092"}}
    for given in ([], ["--database", applications]):
        call_command("run_harvester", *given)
        assert started.pop()[0].data_source == "dbname=direct"
    assert [write_alias("Outbox"), direct_alias(), direct_alias("another")] == [applications, direct, "another"]
    assert option_of(direct) == "", "commands need no option"
    assert harvest_config().data_source == "dbname=direct"


def test_options_win_over_settings(alias, settings, started):
    """Options of `outbox harvest` and `--database` override the settings, Kafka properties one by one."""
    settings.OUTBOX = {"NAME": "set", "KAFKA": {"bootstrap.servers": "kafka:9092", "security.protocol": "ssl"}}
    name = alias(NAME="shop")
    given = ["--database", name, "--drain", "--table", "b.o", "--name", "given", "--metrics-port", "0"]
    call_command("run_harvester", *given, "--bootstrap-servers", "k2:9092", "-X", "client.rack=a")
    ((config, drain),) = started
    assert (drain, config.outbox_table, config.name, config.metrics_port) == (True, "b.o", "given", 0)
    assert config.base_kafka_config == {
        "bootstrap.servers": "k2:9092",
        "security.protocol": "ssl",
        "client.rack": "a",
    }


def test_the_exit_code_is_the_harvesters(alias, started):
    """A harvester that ended with an error ends the process with its exit code."""
    started.code = 1
    with pytest.raises(SystemExit) as ended:
        call_command("run_harvester", database=alias(NAME="shop"))
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("outbox", "said"),
    [
        ({"TABEL": "x"}, "OUTBOX['TABEL'] is no setting. Did you mean 'TABLE'?"),
        ({"DATABASE": "nowhere"}, "database alias 'nowhere' is not in DATABASES"),
        ({"LIMITS": {"heartbeat_timeout": "soon"}}, "OUTBOX['LIMITS']['heartbeat_timeout']: is not a duration"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2(settings, started, outbox, said):
    """Wrong settings are a CommandError with exit code 2, and no harvester is started."""
    settings.OUTBOX = outbox
    with pytest.raises(CommandError) as raised:
        call_command("run_harvester")
    assert said in str(raised.value)
    assert raised.value.returncode == 2
    assert started == []


def _manage(database, bootstrap, *arguments, stdout=subprocess.PIPE):
    return subprocess.run(
        [sys.executable, "-c", _PROJECT, *arguments],
        env={**os.environ, "TEST_DATABASE": database, "TEST_KAFKA": bootstrap},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )


def test_stash_and_drain(database, kafka_bootstrap, make_topic):
    """`run_harvester --drain` publishes the records that a Django process stashed, and leaves the table empty."""
    topic = make_topic()
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA billing")
    for arguments in (["migrate", "--verbosity=0"], ["stash", topic], ["run_harvester", "--drain"]):
        ran = _manage(database, kafka_bootstrap, *arguments)
        assert ran.returncode == 0, ran.stderr
    messages = read_topic(kafka_bootstrap, topic, count=500)
    by_key = {}
    for message in messages:
        by_key.setdefault(message.key, []).append(message.value)
    assert by_key == {str(key).encode(): [b'{"n":%d}' % n for n in range(key, 500, 7)] for key in range(7)}
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM billing.outbox").fetchone() == (0,)


def test_a_missing_table_is_one_line(database, kafka_bootstrap):
    """Without the table the command ends with exit code 2 and one line that names the remedy."""
    ran = _manage(database, kafka_bootstrap, "run_harvester", "-v", "0")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "billing.outbox" in line
    assert "migrate" in line


def test_output_that_cannot_be_written(database, kafka_bootstrap):
    """A reader that has gone, and a full disk, end a command without a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread, Path("/dev/full").open("w") as full:
        ran = _manage(database, kafka_bootstrap, "outbox_status", stdout=unread)
        assert (ran.returncode, ran.stderr) == (141, "")
        ran = _manage(database, kafka_bootstrap, "outbox_status", stdout=full)
    told = "CommandError: the output cannot be written: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (2, told)


@pytest.mark.parametrize("command", ["run_harvester", "outbox_status", "outbox_doctor"])
def test_dsn_without_quotes_does_not_show_its_password(command, capsys):
    """A DSN that a shell has cut into pieces shows no secrets, by Django's own parser either."""
    with pytest.raises(SystemExit) as ended:
        execute_from_command_line(["manage.py", command, "--dsn", "host=db", "password=s3cr3t"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: password=***\n")


def test_interrupted_command_is_one_line(monkeypatch):
    """Ctrl-C ends a command in one line, with exit code 130."""
    monkeypatch.setattr(outbox_peek.Command, "handle", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(CommandError, match=r"^interrupted$") as raised:
        call_command("outbox_peek")
    assert raised.value.returncode == 130
