"""The wheel, installed into clean environments away from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from outbox_core.schema import TableName, create_history_sql, create_hold_sql, create_table_sql
from tests.harvesting import Scene
from tests.packaging.environments import CHECKOUT, Environment

TYPED_PROJECT = Path(__file__).parent / "typed_project"
TYPE_ERROR = re.compile(r"^ *(?:.*/)?(\w+\.py):(\d+)(?::\d+)*(?: -)?:? error", re.MULTILINE)
HOST_ENVIRONMENT = """
from alembic import context
from sqlalchemy import create_engine
with create_engine(context.config.get_main_option("sqlalchemy.url")).begin() as connection:
    context.configure(connection=connection)
    context.run_migrations()
"""
HOST_REVISION = """
from outbox_sqlalchemy.alembic import outbox_0001
revision, down_revision = "host_0001", None
upgrade, downgrade = outbox_0001()
"""

pytestmark = pytest.mark.timeout(600)  # packages may have to be fetched


@pytest.fixture(scope="module")
def base(wheel, tmp_path_factory):
    """Return an environment with the base install only."""
    return Environment(tmp_path_factory.mktemp("base"), str(wheel))


@pytest.fixture(scope="module")
def complete(wheel, tmp_path_factory):
    """Return an environment with the harvester and both adapters."""
    return Environment(tmp_path_factory.mktemp("complete"), f"{wheel}[harvester,sqlalchemy,django]")


@pytest.fixture(scope="module")
def queue_only(wheel, tmp_path_factory):
    """Return an environment with the extra for queues and no database driver."""
    return Environment(tmp_path_factory.mktemp("queue"), f"{wheel}[queue]")


def test_contents(wheel):
    """The wheel holds the packages and the migrations, is marked as typed, and has no tests or devstack."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "outbox_core",
        "outbox_sqlalchemy",
        "outbox_django",
        "outbox_queue",
        "outbox_spark",
    }
    assert "outbox_sqlalchemy/migrations/versions/0001_outbox.py" in names
    assert "outbox_django/migrations/0001_initial.py" in names
    page = [path for path in (CHECKOUT / "outbox_core" / "console" / "page").rglob("*") if path.is_file()]
    assert {str(path.relative_to(CHECKOUT)) for path in page} <= names
    assert "outbox_core/console/page/index.html" in names
    assert {f"{package}/py.typed" for package in tops if package.startswith("outbox_")} <= names
    modules = {"outbox_core/testing/pytest_plugin.py", "outbox_core/testing/kafka.py"}
    assert modules | {f"outbox_{adapter}/testing.py" for adapter in ("django", "queue", "sqlalchemy")} <= names
    required = metadata.get_all("Requires-Dist")
    assert all("extra ==" in requirement for requirement in required), required
    assert {"harvester", "sqlalchemy", "django", "queue", "spark", "tracing"} <= set(metadata.get_all("Provides-Extra"))
    of_tracing = [requirement for requirement in required if "extra == 'tracing'" in requirement]
    assert [requirement.partition(">")[0] for requirement in of_tracing] == ["opentelemetry-api"]


def test_base_install_stashes(base):
    """The base install has no dependencies and is enough to make and stash records."""
    listed = base.pip("list", "--format=freeze")
    assert {line.partition("==")[0] for line in listed.split()} - {"pip", "setuptools"} == {"kafka-outbox"}
    told = base.python(
        "import sys, outbox_core, outbox_core.record; from outbox_core import OutboxRecord, Stasher\n"
        "print(Stasher('a.b').row(OutboxRecord('t', 1, {'x': 1})))\n"
        "print('site-packages' in outbox_core.__file__)\n"
        "print([name for name in ('confluent_kafka', 'psycopg', 'pydantic') if name in sys.modules])"
    )
    assert told.splitlines() == ["('t', '1', b'{\"x\":1}', [], [], None)", "True", "[]"]


def test_base_install_prints_the_schema(base):
    """`outbox schema` needs only the base install."""
    done = base.run("outbox", "schema", "--dialect", "postgresql", "--table", "billing.outbox", check=True)
    billing = TableName.parse("billing.outbox")
    assert done.stdout == create_table_sql(billing) + create_hold_sql(billing) + create_history_sql(billing)
    only = base.run("python", "-m", "outbox_core", "schema", "--only", "outbox", check=True)
    assert only.stdout == create_table_sql(TableName("outbox"))


def test_base_install_does_not_harvest(base):
    """`outbox harvest` names the extra that it needs, in one line."""
    done = base.run("outbox", "harvest")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "kafka-outbox[harvester]" in line
    assert done.stdout == ""


def test_base_install_has_the_testing_helpers(base):
    """The base install is enough for an outbox in memory, and the plugin is registered."""
    told = base.python(
        "from outbox_core import OutboxRecord, Stasher; from outbox_core.testing import in_memory_outbox\n"
        "from importlib.metadata import entry_points\n"
        "with in_memory_outbox() as stashed: Stasher().stash(None, OutboxRecord('t', 1))\n"
        "print(stashed.assert_stashed('t', key=1).key, [entry.value for entry in entry_points(group='pytest11')])"
    )
    assert told.splitlines() == ["1 ['outbox_core.testing.pytest_plugin']"]


@pytest.mark.complete
def test_queues_need_their_extra_alone(base, queue_only):
    """`[queue]` is enough to import all of queues and run their command; the base install names the missing extra."""
    told = queue_only.python(
        "import outbox_queue, outbox_queue.redelivery.tracker\n"
        "from importlib.metadata import entry_points\n"
        "print(sorted(entry.name for entry in entry_points(group='outbox.stash')))"
    )
    assert told.splitlines() == ["['django', 'sqlalchemy']"]
    assert "tracker" in queue_only.run("outbox", "queue", "--help", check=True).stdout
    refused = base.run("outbox", "queue", "stats")
    assert refused.returncode == 2
    assert "kafka-outbox[queue]" in refused.stderr


@pytest.mark.complete
def test_host_application_runs_the_revision(complete, database):
    """A host application's own Alembic chain makes and drops the outbox with one line from the installed package."""
    url = database.replace("postgresql://", "postgresql+psycopg://")
    versions = complete.folder / "host" / "versions"
    versions.mkdir(parents=True)
    (versions.parent / "env.py").write_text(HOST_ENVIRONMENT)
    (versions / "0001_outbox.py").write_text(HOST_REVISION)
    (complete.folder / "alembic.ini").write_text(f"[alembic]\nscript_location = host\nsqlalchemy.url = {url}\n")
    complete.run("alembic", "upgrade", "head", check=True)
    scene = Scene(database, "", layout=None)
    assert scene.count() == 0
    complete.run("alembic", "downgrade", "base", check=True)
    assert scene.execute("SELECT to_regclass('outbox') AS found")[0].found is None


@pytest.mark.complete
def test_shipped_migrations_run(complete, database):
    """The Alembic environment inside the wheel is found and migrates a database by itself."""
    complete.python(
        "from alembic import command; from outbox_sqlalchemy.alembic import alembic_config\n"
        f"command.upgrade(alembic_config({database!r}), 'head')"
    )
    assert Scene(database, "", layout=None).count() == 0


@pytest.fixture(scope="module")
def typed(complete, wheel):
    """Return an environment with all that the typed project imports."""
    complete.pip("install", "--quiet", "--no-compile", f"{wheel}[tracing]", "starlette", "django-stubs")
    return complete


@pytest.mark.complete
def test_mypy(typed, tmp_path):
    """`mypy --strict` accepts a project that uses the packages rightly, and reports each mistake of another."""
    python = typed.folder.parent / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--no-error-summary"]
    _check_types([*command, "--python-executable", python, "orders.py", "mistakes.py"], tmp_path)


@pytest.mark.complete
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not on the PATH: it is a program for Node.js")
def test_pyright(typed, tmp_path):
    """Pyright in strict mode says the same as mypy."""
    python = typed.folder.parent / "bin" / "python"
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    _check_types(["pyright", "--pythonpath", python], tmp_path)


def _check_types(command, folder):
    """Run a type checker in a copy of the user's project; it has to report the lines that are marked, and no others."""
    shutil.copytree(TYPED_PROJECT, folder, dirs_exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    ran = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False, timeout=540)
    lines = (folder / "mistakes.py").read_text().splitlines()
    marked = {("mistakes.py", number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {(name, int(line)) for name, line in TYPE_ERROR.findall(ran.stdout)} == marked, ran.stdout + ran.stderr


def test_django_app_is_found(complete):
    """Django finds the app, its migration and its command in the installed package."""
    told = complete.python(
        "import django; from django.conf import settings\n"
        "settings.configure(INSTALLED_APPS=['outbox_django'], USE_TZ=True, DATABASES={'default': "
        "{'ENGINE': 'django.db.backends.postgresql', 'NAME': 'none'}})\n"
        "django.setup()\n"
        "from django.core.management import call_command, get_commands\n"
        "from django.db.migrations.loader import MigrationLoader\n"
        "print(sorted(name for app, name in MigrationLoader(None).disk_migrations if app == 'outbox_django'))\n"
        "print(get_commands()['run_harvester'])\n"
    )
    assert told.splitlines() == [
        "['0001_initial', '0002_inbox', '0003_hold', '0004_checks', '0005_history', '0006_console']",
        "outbox_django",
    ]


def test_installed_harvester_drains(complete, database, kafka_bootstrap, make_topic):
    """`outbox harvest --drain` from the installed package publishes all records and ends."""
    topic = make_topic()
    scene = Scene(database, kafka_bootstrap)
    arguments = ("harvest", "--drain", "--dsn", database, "--bootstrap-servers", kafka_bootstrap)
    complete.run("outbox", *arguments, check=True)
    scene.fill(topic, 20)
    complete.run("python", "-m", "outbox_core", *arguments, check=True)
    assert scene.count() == 0
    assert len(scene.read(topic)) == 20
