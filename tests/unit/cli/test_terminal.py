"""Output of the commands: for people on a terminal, for programs elsewhere."""

import io
import json
import logging
import subprocess

import pytest

from outbox_core.cli import build_parser, harvest, main
from outbox_core.cli.logs import configure_logging
from outbox_core.cli.terminal import RED, paint, write_table
from outbox_core.config.names import ON_COMMAND_LINE, option, variable
from outbox_core.doctor.findings import CommandLine, ManagePy

ROWS = [["topic", "orders", "-"], ["key", "o", "4711\n"]]


class Terminal(io.StringIO):
    """An output that a person reads."""

    def isatty(self):
        return True


def test_tables(monkeypatch):
    """On a terminal columns are aligned under their titles; elsewhere a line has tabs and there are no titles."""
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        write_table(out, ["WHAT", "TOPIC", "KEY"], ROWS)
    assert terminal.getvalue() == "WHAT   TOPIC   KEY\ntopic  orders  -\nkey    o       4711\\n\n"
    assert pipe.getvalue() == "topic\torders\t-\nkey\to\t4711\\n\n"


def test_colour(monkeypatch):
    """Colour is for terminals, and not for those that do not want it."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("x", RED, Terminal()) == "\x1b[31mx\x1b[0m"
    assert paint("x", RED, io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", RED, Terminal()) == "x"


def test_help_names_environment_variables(capsys):
    """The help of `outbox harvest` names the variable of each option that has one, as the settings know it."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["harvest", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    for field in ON_COMMAND_LINE:
        if field not in ("accept_marked", "accept_moved"):
            assert harvest.variable_of(option((field,))) == variable((field,))
            assert variable((field,)) in shown
    assert "OUTBOX_KAFKA_BOOTSTRAP" in shown
    assert "OUTBOX_LOG_FORMAT" in shown


def test_completion(tmp_path, capsys):
    """Bash completes commands by the printed script."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "outbox.bash"
    script.write_text(capsys.readouterr().out)
    typed = f"source {script}; COMP_WORDS=(outbox do); COMP_CWORD=1; _shtab_outbox; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["doctor"]


def test_json_log(capsys):
    """With `--log-format json` each line is an object; tracebacks are in it, and secrets are not."""
    before = logging.root.handlers[:]
    configure_logging(logging.INFO, "json")
    try:
        logging.getLogger("some.library").warning("connecting to %s\nforged", "postgresql://u:s3cr3t@h/d")
        try:
            int("password=s3cr3t")
        except ValueError:
            logging.getLogger("outbox_core").exception("ended")
    finally:
        logging.root.handlers[:] = before
    lines = capsys.readouterr().err.splitlines()
    first, second = map(json.loads, lines)
    assert (first["level"], first["logger"]) == ("warning", "some.library")
    assert first["message"] == "connecting to postgresql://u:***@h/d\nforged"
    assert first["time"].endswith("+00:00")
    assert "Traceback" in second["exception"]
    assert "s3cr3t" not in "".join(lines)


def test_log_format_from_file_and_environment(monkeypatch, tmp_path, capsys):
    """A wrong format is an error that names its source."""
    path = tmp_path / "reaper.yaml"
    path.write_text("logging: {format: xml}")
    assert main(["harvest", "-f", str(path)]) == 2
    assert "logging.format: is not a format; write one of text, json" in capsys.readouterr().err
    path.write_text("logging: {level: loud}\nharvest: {leaderTopc: x}\ndataSource: host=h")
    assert main(["harvest", "-f", str(path)]) == 2
    told = capsys.readouterr().err
    for mistake in (
        "logging.level: is not a level",
        "did you mean leaderTopic?",
        "dataSource: belongs under `harvest:`",
    ):
        assert mistake in told, "all mistakes at once"
    monkeypatch.setenv("OUTBOX_LOG_FORMAT", "yaml")
    assert main(["harvest"]) == 2
    assert "OUTBOX_LOG_FORMAT: is not a format" in capsys.readouterr().err


def test_remedies_name_the_command_that_was_run():
    """Remedies lead to the same outbox: with its table and file, or as commands of the Django project."""
    typed = CommandLine("billing.outbox", ("-f", "my outbox.yaml"))
    assert typed.make_tables() == "`outbox schema --apply -f 'my outbox.yaml' --table billing.outbox`"
    assert typed.hold("list") == "`outbox hold list -f 'my outbox.yaml' --table billing.outbox`"
    assert CommandLine().add_checks("text") == "`outbox schema --apply --only checks --layout text`"
    further = ManagePy("events", "billing_outbox")
    assert further.hold("list") == "`manage.py outbox_hold list --database events --table billing_outbox`"
    assert further.make_tables() == "a migration that runs the SQL of `outbox schema --table billing_outbox`"
    assert ManagePy("events").make_tables() == "`manage.py migrate outbox_django --database events`"
    assert ManagePy().harvest == "`manage.py run_harvester`"
