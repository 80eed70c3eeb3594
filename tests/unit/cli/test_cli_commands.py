"""Commands that other packages add to `outbox`."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from outbox_core import cli


@pytest.fixture
def added(monkeypatch):
    """Let `outbox queue` be something else: `added(value)` names it as `module:function`."""

    def add(value):
        found = [EntryPoint(name="queue", value=value, group="outbox.commands")]
        monkeypatch.setattr(cli, "entry_points", lambda group: found if group == "outbox.commands" else [])

    return add


def play(arguments):
    """Print the arguments, in place of a command."""
    sys.stdout.write(f"played {arguments}\n")
    return 7


def test_an_added_command_gets_its_arguments(added, capsys):
    """An added command gets all arguments behind its name, even `outbox`'s own options; its exit code counts."""
    added(f"{__name__}:play")
    assert cli.main(["queue", "--version", "stats"]) == 7
    assert capsys.readouterr().out == "played ['--version', 'stats']\n"


def test_a_command_whose_extra_is_missing(added, capsys):
    """A command whose extra is missing is refused with the name of the package and of the extra."""
    added("no_such_package.command:main")
    assert cli.main(["queue", "stats"]) == 2
    assert (
        capsys.readouterr().err
        == "outbox: error: needs no_such_package, which is not installed; pip install 'kafka-outbox[queue]'\n"
    )


def test_added_commands_are_listed(added, capsys):
    """`outbox --help` names added commands without importing them."""
    added("no_such_package.command:main")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "outbox queue --help" in capsys.readouterr().out


def test_other_commands_do_not_import_queues():
    """`outbox schema` does not import queues."""
    code = "import sys; from outbox_core.cli import main; main(['schema']); sys.exit('outbox_queue' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
