"""The command line with a stand-in for the harvester: parsing, exit codes, signals, one line for each error."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid

import pytest

from outbox_core import __version__
from outbox_core.cli import harvest, hold, main
from outbox_core.cli.signals import stop_on_signals
from outbox_core.config import HarvestConfig
from outbox_core.errors import KafkaUnavailable, LeaderTopicError, StoreUnavailable
from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRefreshed, LeaderRevoked, MeterRead, MeterStats
from outbox_core.harvest import harvester as harvester_module
from outbox_core.metrics import HarvestMetrics, Health
from outbox_core.schema import (
    TableName,
    add_checks_sql,
    checks_of,
    create_history_sql,
    create_hold_sql,
    create_table_sql,
)


class PlayedHarvester:
    """A stand-in for the harvester that ends at once, or as the test says."""

    start_error: BaseException | None = None
    end_error: BaseException | None = None
    made: "list[PlayedHarvester]"

    def __init__(self, config, on_event=None, *, metrics=None, drain=False):
        self.config, self.on_event, self.metrics, self.drain = config, on_event, metrics, drain
        self.started = self.stopped = False
        self.made.append(self)

    def start(self):
        if self.start_error:
            raise self.start_error
        self.started = True

    def stop(self):
        self.stopped = True

    def join(self, _timeout=None):
        if self.end_error:
            raise self.end_error
        return True

    def health(self):
        return Health(ok=True, leader=False)


@pytest.fixture
def played(monkeypatch):
    """Yield the class that stands in for the harvester; its `made` lists the objects made of it."""
    stand_in = type("Played", (PlayedHarvester,), {"made": []})
    monkeypatch.setattr(harvester_module, "Harvester", stand_in)
    for name in [name for name in os.environ if name.startswith("OUTBOX_")]:
        monkeypatch.delenv(name)
    yield stand_in
    logging.basicConfig(force=True)


def run_outbox(*arguments, stdin=None, **environ):
    """Run `python -m outbox_core` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "outbox_core", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        input=stdin,
        env={**os.environ, **environ},
        check=False,
    )


# -- outbox schema, outbox --version -----------------------------------------------------------------------------------


def test_schema_prints_the_ddl():
    """`outbox schema` prints the DDL of the outbox, its holds and its history, and nothing else."""
    done = run_outbox("schema", "--dialect", "postgresql")
    assert done.returncode == 0
    name = TableName("outbox")
    assert done.stdout == create_table_sql(name) + create_hold_sql(name) + create_history_sql(name)
    assert done.stderr == ""


def test_schema_takes_table_and_layout(capsys):
    """`outbox schema` takes another name, goharvest's layout, or one of the two tables alone."""
    name = TableName("outbox", "billing")
    assert main(["schema", "--table", "billing.outbox", "--layout", "text"]) == 0
    printed = capsys.readouterr().out
    assert printed == create_table_sql(name, "text") + create_hold_sql(name) + create_history_sql(name)
    assert main(["schema", "--table", "billing.outbox", "--only", "hold"]) == 0
    assert capsys.readouterr().out == create_hold_sql(name)
    assert main(["schema", "--table", "billing.outbox", "--only", "history"]) == 0
    assert capsys.readouterr().out == create_history_sql(name)
    assert main(["schema", "--only", "outbox"]) == 0
    assert capsys.readouterr().out == create_table_sql(TableName("outbox"))


def test_grants_by_column(capsys):
    """`--grants` prints the least rights of each role for the layout, with quoted names."""
    assert main(["schema", "--table", "billing.outbox", "--grants", "app", 'o"dd']) == 0
    printed = capsys.readouterr().out
    assert "GRANT INSERT (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values," in printed
    assert 'GRANT SELECT, DELETE, UPDATE (leader_id) ON TABLE "billing"."outbox" TO "o""dd";' in printed
    assert 'SEQUENCE "billing"."outbox_id_seq" TO "o""dd"' in printed
    assert "create_time" not in printed.partition("GRANT INSERT")[2]
    assert main(["schema", "--layout", "text", "--grants", "app", "harvester"]) == 0
    printed = capsys.readouterr().out
    assert "GRANT INSERT (create_time, kafka_topic" in printed
    assert "kafka_partition" not in printed
    assert 'GRANT USAGE ON SEQUENCE "public"."outbox_id_seq" TO "app"' in printed


def test_constraints_for_an_older_table(capsys):
    """`--only checks` prints the statement that adds them, and the remaining steps as comments."""
    assert main(["schema", "--only", "checks", "--layout", "text"]) == 0
    statements = capsys.readouterr().out
    commands = [line for line in statements.splitlines() if not line.startswith("--")]
    assert commands == add_checks_sql(TableName("outbox"), checks_of("text")).splitlines()
    assert "kafka_partition" not in statements
    assert "-- ALTER TABLE" in statements


@pytest.mark.parametrize(
    "arguments",
    [["--grants", "a", "b", "--notify"], ["--grants", "a", "b", "--only", "hold"], ["--inbox", "--grants", "a", "b"]],
)
def test_grants_are_printed_alone(arguments, capsys):
    """Options that do not go with `--grants` are refused in one line."""
    assert main(["schema", *arguments]) == 2
    assert capsys.readouterr().err.startswith("outbox: error: --grants:")


def test_schema_refuses_what_is_no_table_name(capsys):
    """An illegal table name is refused in one line that names the option."""
    assert main(["schema", "--table", "a b"]) == 2
    assert capsys.readouterr().err.startswith("outbox: error: --table: 'a b' is not a table name")


def test_schema_survives_a_closed_pipe():
    """`outbox schema | true` writes nothing to stderr."""
    command = f"{sys.executable} -m outbox_core schema | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("redirection", "code", "told"),
    [
        (">/dev/full", 2, "outbox: error: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(redirection, code, told):
    """A full disk is one line and exit code 2; closed output is as `/dev/null`."""
    command = f"{sys.executable} -m outbox_core schema {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, told)


def test_characters_that_the_terminal_lacks():
    """Characters that the encoding of the output lacks are escaped."""
    done = run_outbox("schema", "--only", "outbox", "--table", '"ключ"', PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert r'CREATE TABLE "\u043a\u043b\u044e\u0447"' in done.stdout


def test_interrupted_command_is_one_line(played, capsys):
    """Ctrl-C before the harvester takes signals, and in commands that do not, ends in one line and exit code 130."""
    played.start_error = KeyboardInterrupt()
    assert main(["harvest"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "outbox: error: interrupted"


def test_interrupted_question_is_a_no(monkeypatch):
    """Ctrl-C at a question answers it with no, so that the command says what it left undone."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert hold.ask_on_terminal("Delete?") is False


@pytest.mark.parametrize(
    ("dsn", "told"),
    [(["host=db", "password=s3cr3t"], "password=***"), (["postgresql://u:s3c", "r3t@db/x"], "***@db/x")],
)
def test_dsn_without_quotes_does_not_show_its_password(dsn, told, capsys):
    """A DSN that a shell has cut into pieces shows no secrets."""
    with pytest.raises(SystemExit):
        main(["harvest", "--dsn", *dsn])
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {told}\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["harvest", "--drian"], "outbox harvest: error: unrecognized arguments: --drian (did you mean --drain?)"),
        (
            ["hold", "list", "--topc", "a"],
            "outbox hold list: error: unrecognized arguments: --topc a (did you mean --topic?)",
        ),
        (["harvest", "now"], "outbox harvest: error: unrecognized arguments: now"),
    ],
)
def test_mistyped_option_is_told_by_its_command(arguments, told, capsys):
    """A command refuses an option that it does not have, with its own usage and the option that was meant."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.rstrip().rsplit("\n", 1)
    assert error == told
    assert usage.startswith("usage: outbox " + arguments[0])


def test_schema_needs_no_dependencies():
    """The base install prints the DDL without importing any site-package."""
    code = "import sys; sys.path.insert(0, '.'); from outbox_core.cli import main; sys.exit(main(['schema']))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_harvest_without_its_extra_says_how_to_get_it():
    """`outbox harvest` without its extra prints one line with the command that installs it."""
    code = "import sys; sys.path.insert(0, '.'); from outbox_core.cli import main; sys.exit(main(['harvest']))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("not installed; pip install 'kafka-outbox[harvester]'\n")
    assert done.stderr.count("\n") == 1


def test_version(capsys):
    """`outbox --version` names the distribution."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kafka-outbox {__version__}\n"


def test_no_command_is_an_error(capsys):
    """`outbox` without a command ends with exit code 2 and its usage."""
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage: outbox" in capsys.readouterr().err


def test_wrong_command_is_corrected(capsys):
    """A misspelt command ends with exit code 2 and the one that was meant."""
    with pytest.raises(SystemExit) as ended:
        main(["harvst"])
    assert ended.value.code == 2
    assert "did you mean 'harvest'?" in capsys.readouterr().err


# -- outbox harvest: settings ------------------------------------------------------------------------------------------


def test_options_become_settings(played):
    """Every option becomes its setting."""
    arguments = (
        "harvest --drain --dsn dbname=d --bootstrap-servers k:1 --table b.outbox --leader-topic t --leader-group-id g"
        " --name n --metrics-host ::1 -X security.protocol=ssl -X sasl.password=a=b"
    )
    assert main(arguments.split()) == 0
    (harvester,) = played.made
    assert harvester.drain is True
    assert harvester.config == HarvestConfig(
        data_source="dbname=d",
        base_kafka_config={"security.protocol": "ssl", "sasl.password": "a=b", "bootstrap.servers": "k:1"},
        outbox_table="b.outbox",
        leader_topic="t",
        leader_group_id="g",
        name="n",
        metrics_host="::1",
    )


def test_command_line_wins_over_environment_over_file(played, monkeypatch, tmp_path):
    """An option wins over its variable, and a variable over the file, in one run."""
    path = tmp_path / "reaper.yaml"
    path.write_text("harvest: {leaderTopic: file, name: file, leaderGroupID: file}")
    monkeypatch.setenv("OUTBOX_LEADER_TOPIC", "environ")
    monkeypatch.setenv("OUTBOX_NAME", "environ")
    assert main(["harvest", "-f", str(path), "--name", "option"]) == 0
    config = played.made[0].config
    assert (config.name, config.leader_topic, config.leader_group_id) == ("option", "environ", "file")


def test_overrides_leave_out_what_was_not_given():
    """Options that were not given are no overrides, and neither are Django's own ones."""
    options = {"dsn": None, "kafka_properties": None, "bootstrap_servers": None, "metrics_port": 0, "verbosity": 1}
    assert harvest.overrides_from(options) == {"metrics_port": 0}


def test_level_of_the_file_is_applied(played, tmp_path):
    """`logging.level` of the file applies, unless an option sets the level."""
    path = tmp_path / "reaper.yaml"
    path.write_text("logging: {level: Debug}")
    main(["harvest", "-f", str(path)])
    assert logging.getLogger().level == logging.DEBUG
    main(["harvest", "-f", str(path), "--log-level", "warn"])
    assert logging.getLogger().level == logging.WARNING
    assert len(played.made) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-f", "/nonexistent/reaper.yaml"], "/nonexistent/reaper.yaml: cannot be read: No such file or directory"),
        (["-f", "/"], "/: cannot be read: Is a directory"),
        (["--table", "a b"], "--table: 'a b' is not a table name"),
        (["--dsn", "s3cr3t"], "--dsn: is not a list of `key=value` pairs"),
        (["--log-level", "loud"], "--log-level: is not a level"),
        (["-X", "acks=1"], "-X acks: must be `all`"),
        (["--metrics-port", "70000"], "--metrics-port: "),
    ],
)
def test_wrong_setting_is_one_line_and_exit_code_2(played, capsys, arguments, complaint):
    """A wrong setting is one line and exit code 2, and no harvester is made."""
    assert main(["harvest", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"outbox: error: {complaint}")
    assert "s3cr3t" not in line
    assert not played.made


@pytest.mark.parametrize(
    ("properties", "told"),
    [
        ("sasl.password: 1234", "harvest.baseKafkaConfig.sasl.password: put it in quotes: YAML reads it as a number"),
        ("sasl.password=s3cr3t", "harvest.baseKafkaConfig.sasl.password=***: has no value"),
    ],
)
def test_mistake_in_a_secret_is_told_in_full(played, tmp_path, capsys, properties, told):
    """A mistake in a password is told in full, and the password is not."""
    file = tmp_path / "reaper.yaml"
    file.write_text("harvest: {baseKafkaConfig: {" + properties + "}}")
    assert main(["harvest", "-f", str(file)]) == 2
    assert capsys.readouterr().err == f"outbox: error: {told}\n"
    assert not played.made


def test_property_without_value_is_refused_without_quoting_it(capsys):
    """A property without a value is refused without being quoted: it may be a password."""
    with pytest.raises(SystemExit) as ended:
        main(["harvest", "-X", "s3cr3t"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "write PROPERTY=VALUE" in error
    assert "s3cr3t" not in error


# -- outbox harvest: running -------------------------------------------------------------------------------------------


def test_error_at_start_is_one_line_and_exit_code_2(played, capsys):
    """An error at the start is one line and exit code 2, even if its text has several lines."""
    played.start_error = KafkaUnavailable("cannot reach Kafka at\nbootstrap.servers=x")
    assert main(["harvest", "--log-level", "off"]) == 2
    assert capsys.readouterr().err == "outbox: error: cannot reach Kafka at bootstrap.servers=x\n"


def test_passwords_do_not_reach_the_error_line(played, capsys):
    """A password is hidden in an error line, as a driver's message may quote the connection string."""
    played.start_error = StoreUnavailable("no route to host=h password=s3cr3t dbname=d")
    assert main(["harvest", "--log-level", "off"]) == 2
    assert capsys.readouterr().err == "outbox: error: no route to host=h password=*** dbname=d\n"


def test_error_while_running_is_one_line_and_exit_code_1(played, capsys):
    """An error while running is one line and exit code 1, on which a supervisor restarts."""
    played.end_error = LeaderTopicError("the leader topic is gone")
    assert main(["harvest", "--log-level", "off"]) == 1
    assert capsys.readouterr().err == "outbox: error: the leader topic is gone\n"


def test_unexpected_error_while_running_is_logged_in_full(played, capsys):
    """An unexpected error, a bug of ours, is logged with its traceback and ends with one line and exit code 1."""
    played.end_error = ZeroDivisionError("division by zero")
    assert main(["harvest"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("outbox: error: division by zero\n")


def test_metrics_port_in_use_is_found_before_anything_starts(played, capsys, metrics_server):
    """A metrics port in use is an error before the harvester contends, which would disturb the others."""
    assert main(["harvest", "--metrics-port", str(metrics_server)]) == 2
    assert "metrics_port: cannot listen on port" in capsys.readouterr().err
    assert not any(harvester.started for harvester in played.made)


@pytest.fixture
def metrics_server():
    """Yield a port that is taken."""
    from outbox_core.metrics import MetricsServer

    with MetricsServer("127.0.0.1", 0, HarvestMetrics().registry, lambda: Health(ok=True, leader=False)) as server:
        yield server.port


def test_passwords_do_not_reach_the_log(played, capsys):
    """A password in any logger's message does not reach the log."""
    main(["harvest", "--dsn", "host=h"])
    logging.getLogger("some.library").warning("connecting to %s", "postgresql://u:s3cr3t@h/d")
    error = capsys.readouterr().err
    assert "postgresql://u:***@h/d" in error
    assert len(played.made) == 1


def test_events_are_logged(played, caplog):
    """A new leader ID and each meter read is a line; the election logs its events itself."""
    main(["harvest"])
    caplog.handler.setLevel(logging.INFO)
    logging.getLogger().addHandler(caplog.handler)
    leader_id = uuid.uuid4()
    stats = MeterStats(5.0, 10.0, 500, 2000, 100.0, 200.0)
    handler = played.made[0].on_event
    for event in (
        LeaderAcquired(leader_id, 7),
        LeaderRefreshed(leader_id),
        LeaderRefreshed(uuid.uuid4()),  # marks fail, each retry has a new one: that fills no log
        LeaderRevoked(leader_id),
        LeaderFenced(leader_id, "lease over"),
        MeterRead(stats),
        MeterRead(MeterStats(5.0, 36_000.0, 1, 20, 0.2, 20 / 36_000)),
    ):
        handler(event)
    logging.getLogger().removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records if record.name == "outbox_core.cli.harvest"]
    assert lines == list(dict.fromkeys(lines))
    assert lines == [
        f"leading on, new leader ID {leader_id}: records are marked again",
        "published 500 records, 100/s; 2,000 in all, 200/s",
        "published 1 record, 0.2/s; 20 in all, 2/h",
    ]


@pytest.mark.usefixtures("played")
def test_end_tells_what_was_published(capsys):
    """The last line has the numbers of the whole run, each with the right plural, and only those that there are."""
    assert main(["harvest"]) == 0
    assert capsys.readouterr().err.endswith(" ended: published 0 records in all\n")


def test_end_tells_what_did_not_arrive(played, capsys, monkeypatch):
    """The last line names dead letters, failed attempts and holds, also of a run that an error ended."""
    totals = HarvestMetrics().totals()._replace(published=1, failed=3, dead_letters=1, holds=2_000)
    monkeypatch.setattr(HarvestMetrics, "totals", lambda _: totals)
    played.end_error = StoreUnavailable("gone")
    assert main(["harvest"]) == 1
    start, log, error = capsys.readouterr().err.splitlines()
    assert start.endswith("table outbox, Kafka at localhost:9092, delivery at-least-once")
    expected = (
        "ended: published 1 record in all; 1 record to the dead-letter topic; 3 attempts failed; 2,000 holds left"
    )
    assert log.endswith(expected)
    assert error == "outbox: error: gone"


@pytest.mark.parametrize("command", ["harvest", "status", "doctor", "peek"])
def test_each_mistake_is_a_line_by_its_name(command, capsys, monkeypatch, tmp_path):
    """All mistakes are told at once, each in its own line by the name under which it was made, the table's, too."""
    file = tmp_path / "outbox.yaml"
    file.write_text("dataSource: x\nharvest:\n  delivry: at-least-once\n  retention: for ever\n")
    monkeypatch.setenv("OUTBOX_METRICS_PORT", "70000")
    assert main([command, "-f", str(file), "--table", "a.b.c"]) == 2
    lines = set(capsys.readouterr().err.splitlines())
    assert lines >= {
        "outbox: error: dataSource: belongs under `harvest:`",
        "outbox: error: harvest.delivry: unknown field; did you mean delivery?",
        "outbox: error: harvest.retention: must be 'delete' or 'archive'",
    }
    if command != "peek":  # it asks the file alone
        assert lines >= {
            "outbox: error: OUTBOX_METRICS_PORT: must be 65535 or less",
            "outbox: error: --table: 'a.b.c' is not a table name; write `table` or `schema.table`",
        }


@pytest.mark.parametrize("command", [["hold", "list"], ["peek"], ["restash", "--topic", "t"], ["schema", "--version"]])
def test_mistakes_in_variables_that_say_where_the_outbox_is(command, capsys, monkeypatch):
    """Commands that need no other setting name the variable, too, when database or table come from it."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", " ")
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("outbox: error: OUTBOX_POSTGRES_DSN: is empty; ")
    monkeypatch.setenv("OUTBOX_TABLE", " outbox")
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("outbox: error: OUTBOX_TABLE: ' outbox' is not a table name; ")


def test_wrong_level_hides_no_other_mistake(capsys, tmp_path):
    """A wrong log level is one mistake among the others."""
    file = tmp_path / "outbox.yaml"
    file.write_text("logging: {level: lout}\nharvest: {notify: perhaps}\n")
    assert main(["harvest", "-f", str(file)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("outbox: error: logging.level: is not a level; ")
    assert second == "outbox: error: harvest.notify: must be true or false"


# -- signals -----------------------------------------------------------------------------------------------------------


def test_first_signal_stops_and_handlers_are_restored():
    """The first signal calls `stop` once; afterwards the old handlers are back."""
    stopped = threading.Event()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_on_signals(stopped.set):
        signal.raise_signal(signal.SIGTERM)
        assert stopped.wait(5)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_the_main_thread_signals_are_left_alone():
    """Outside the main thread signals are left alone, as Python allows no handlers there."""
    seen = []

    def use():
        with stop_on_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


PROCESS = """
    import signal, sys, time, threading
    from outbox_core.cli.signals import stop_on_signals
    signal.signal(signal.SIGHUP, signal.{hangup})  # whoever runs this may have `nohup`
    asked = threading.Event()
    with stop_on_signals(asked.set):
        print("ready", flush=True)
        asked.wait()
        print("stopping", flush=True)
        {then}
    sys.exit(0)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_exits_at_once(number, code):
    """A second signal exits at once, even while the main thread sits in a C call that no handler can interrupt."""
    busy = "import ctypes\n        while True: ctypes.CDLL(None).sleep(100)"
    process = _start(busy)
    process.send_signal(number)
    assert process.stdout.readline() == "stopping\n"
    began = time.monotonic()
    time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(50) == code
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_ends_well(number):
    """After one signal and a graceful stop the exit code is 0, also if a terminal was closed."""
    process = _start("pass")
    process.send_signal(number)
    assert process.wait(50) == 0


def test_a_signal_that_is_sent_twice_is_one():
    """`timeout` signals its command and their group, so the command gets two: they are one."""
    process = _start("time.sleep(0.5)")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)  # another one, as two that are equal may arrive as one
    assert process.wait(50) == 0


def test_nohup_is_respected():
    """A SIGHUP that was ignored stays so: the process goes on."""
    process = _start("pass", hangup="SIG_IGN")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(50) == 0


def _start(then, hangup="SIG_DFL"):
    code = textwrap.dedent(PROCESS.format(then=then, hangup=hangup))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process
