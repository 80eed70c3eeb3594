"""Code blocks of the docs are run, or say why not: `tests/docs/blocks.py` tells how."""

from __future__ import annotations

import ast
import asyncio
import configparser
import importlib
import inspect
import json
import re
import shlex
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import psycopg
import pytest
import yaml
from confluent_kafka import Consumer
from prometheus_client import Metric
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from outbox_core.config import load_config, read_document
from outbox_core.config.sources import _VARIABLES as CONFIG_VARIABLES
from outbox_core.metrics import HarvestMetrics
from outbox_queue import QueueMetrics
from tests.docs import shell
from tests.docs.blocks import BLOCKS, ROOT, Block, blocks_of, pages, run_blocks
from tests.docs.worlds import DJANGO_PAGES, WORLDS, World, hold_record, make_outbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings  # noqa: F401

NOT_RUN_LANGUAGES = {
    "": "output, formulas and sketches",
    "mermaid": "the reader's browser draws it",
}
LANGUAGES = {"python", "bash", "sh", "console", "yaml", "json", "sql", "ini", "dockerfile", "promql"}

PYTHON_PAGES = [
    path for path in pages() if any(block.language == "python" and block.is_run for block in blocks_of(path))
]


def _named(blocks: list[Block]) -> Any:
    return pytest.mark.parametrize("block", blocks, ids=[block.place for block in blocks])


def test_blocks_are_found() -> None:
    """The collector sees blocks in lists, blocks with marks, and every language that pages use."""
    assert {block.language for block in BLOCKS} <= LANGUAGES | set(NOT_RUN_LANGUAGES)
    fences = sum(len(re.findall(r"^ *```", path.read_text(), re.MULTILINE)) for path in pages())
    assert len(BLOCKS) * 2 == fences
    assert any(block.mark for block in BLOCKS)
    commands = re.compile(r"^(pip|python|outbox|alembic|make|\w+=\S+) \S")
    assert [block.place for block in BLOCKS if not block.language and commands.match(block.text)] == []


@_named([block for block in BLOCKS if block.mark])
def test_marks_say_why(block: Block) -> None:
    """A mark has a reason, or names a test that exists and reads the page."""
    if block.mark.startswith("run by "):
        path = ROOT / block.mark.removeprefix("run by ")
        assert Path(block.page).stem in path.read_text(), f"{path} does not run {block.page}"
    else:
        assert len(block.mark.removeprefix("not run: ")) > 10, f"{block.place}: say why it is not run"


@_named([block for block in BLOCKS if block.mark.startswith("not run") and block.language == "python"])
def test_python_that_is_not_run_can_be_read(block: Block) -> None:
    """It compiles, and what it imports from this project exists."""
    body = "".join(f"    {line}\n" for line in block.text.splitlines())
    tree = ast.parse(f"async def block():\n{body}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outbox_"):
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def _page(path: Path) -> Any:
    name = path.relative_to(ROOT).as_posix()
    return pytest.param(path, id=name, marks=[pytest.mark.django_db] if name in DJANGO_PAGES else [])


@pytest.mark.parametrize("page", [_page(path) for path in PYTHON_PAGES])
def test_python_runs(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The blocks of a page run one after the other, with each other's names."""
    monkeypatch.chdir(tmp_path)  # blocks may write files
    name = page.relative_to(ROOT).as_posix()
    world = WORLDS[name](request) if name in WORLDS else World()
    module = ModuleType("page_of_the_docs")  # frameworks look up where a name was defined
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = module.__dict__
    for block in blocks_of(page):
        if block.language != "python" or not block.is_run:
            continue
        names.update(world.names())
        try:
            _run(block, names, world)
        except Exception as error:
            error.add_note(
                f"{block.place}: give it the names it needs in tests/docs/worlds.py, or write "
                "<!-- not run: REASON --> in the line before the block"
            )
            raise
        if world.after_each is not None:
            world.after_each(names)
    if world.after is not None:
        world.after(names)


def _run(block: Block, names: dict[str, Any], world: World) -> None:
    source = block.text
    for given, real in world.replaced.items():
        source = source.replace(given, real)
    source = "\n" * (block.line - 1) + source  # a traceback then shows the line of the page
    code = compile(source, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(_run_async(code, names))
    else:
        exec(code, names)  # noqa: S102
    for value in list(names.values()):
        if isinstance(value, Engine):
            value.dispose()
        elif isinstance(value, Consumer):
            value.close()


async def _run_async(code: CodeType, names: dict[str, Any]) -> None:
    """Run a block with `await`, and close what belongs to its loop."""
    try:
        await eval(code, names)  # noqa: S307
    finally:
        for value in list(names.values()):
            if isinstance(value, AsyncSession):
                await value.close()
                await value.bind.dispose()
            elif isinstance(value, AsyncEngine):
                await value.dispose()


@_named(run_blocks("bash", "sh", "console"))
def test_commands_exist(block: Block) -> None:
    """Every command is known, and its options are those of its parser."""
    seen = 0
    for command in shell.commands(block.text):
        seen += 1
        try:
            shell.check(command)
        except SystemExit:
            pytest.fail(f"{block.place}: {shlex.join(command)} is refused; see standard error")
    assert seen > 0


def test_commands_that_end_by_themselves_run(database, monkeypatch, capsys) -> None:
    """`outbox schema` and the harmless commands of `outbox hold` do what the pages say."""
    from outbox_core.cli import main

    make_outbox(database)
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", database)
    run = 0
    for block in run_blocks("bash", "console"):
        for program, *arguments in shell.commands(block.text):
            harmless = arguments[:1] == ["schema"] or arguments[:2] in (
                ["hold", name] for name in ("list", "add", "release")
            )
            if program == "outbox" and harmless:
                hold_record(database, 17)
                assert main(arguments) == 0, f"{block.place}: {arguments}: {capsys.readouterr().err}"
                run += 1
    assert run > 5


@_named(run_blocks("yaml"))
def test_yaml_is_accepted(block: Block, tmp_path: Path, monkeypatch) -> None:
    """Files of ours pass their validation, alerts name metrics, manifests name our variables and commands."""
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    document = yaml.safe_load(block.text)
    for variable in re.findall(r"\$\{(\w+)\}", block.text):
        monkeypatch.setenv(variable, "postgresql://localhost/shop")
    if "groups" in document:
        _check_alerts(document)
    elif "apiVersion" in document or "services" in document:
        _check_manifest(document)
    elif "bootstrap-servers" in document:
        from outbox_queue import QueueConfig

        QueueConfig.from_yaml(path)
    elif pipelines := set(document) & _pipelines():
        _check_pipelines(path, pipelines)
    else:
        load_config(read_document(path), environ={}, overrides={})


def _pipelines() -> set[str]:
    from outbox_spark.config import PIPELINES

    return set(PIPELINES)


def _check_pipelines(path: Path, pipelines: set[str]) -> None:
    import os

    from outbox_spark.config import read_document as read_pipeline
    from outbox_spark.config import validate

    document = {"kafka": {"bootstrap.servers": "localhost:9092"}, **read_pipeline(path, os.environ)}
    for pipeline in pipelines:
        validate(document, pipeline)


def _families() -> list[Metric]:
    return [*HarvestMetrics(outbox_name="shop").registry.collect(), *QueueMetrics().registry.collect()]


def _unknown_metrics(expression: str) -> set[str]:
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    known = {family.name + suffix for family in _families() for suffix in suffixes.get(family.type, [""])}
    used = set(re.findall(r"\boutbox_\w+", re.sub(r'"[^"]*"', "", expression)))
    assert used, f"{expression} asks for no metric of ours"
    return used - known


def _check_alerts(document: dict[str, Any]) -> None:
    for group in document["groups"]:
        for rule in group["rules"]:
            assert _unknown_metrics(rule["expr"]) == set(), f"{rule['alert']} asks for metrics that do not exist"
            assert rule["annotations"]["summary"]


@_named(run_blocks("promql"))
def test_queries_ask_for_metrics_that_exist(block: Block) -> None:
    """Each line is a query."""
    assert [line for line in block.text.splitlines() if _unknown_metrics(line)] == []


def test_every_metric_is_documented() -> None:
    """Each family is in a table of metrics, a queue's without its prefix."""
    page, queues = ((ROOT / "docs" / name).read_text() for name in ("metrics.md", "queues-operations.md"))
    told = set(re.findall(r"`(outbox_\w+)`", page)) | {
        f"outbox_queue_{name}" for name in re.findall(r"`(\w+)`", queues)
    }
    names = {family.name for family in _families() if family.name.startswith("outbox_")}
    assert len(names) > 25
    assert sorted(name for name in names if not {name, f"{name}_total"} & told) == []


def _check_manifest(document: Any) -> None:
    """Check every variable and every command of ours in a manifest of Kubernetes or Compose."""
    if isinstance(document, list):
        for item in document:
            _check_manifest(item)
    if not isinstance(document, dict):
        return
    given = [document.get("name", "")] if {"value", "valueFrom"} & set(document) else []
    environment = document.get("environment", {})
    for name in [*given, *(environment if isinstance(environment, dict) else ())]:
        _check_variable(name)
    for key in ("command", "args"):
        if isinstance(document.get(key), list) and document[key][:1] in (["outbox"], ["python"]):
            shell.check(document[key])
    for value in document.values():
        _check_manifest(value)


def _check_variable(name: str) -> None:
    if name.startswith("OUTBOX_") and not name.startswith(("OUTBOX_KAFKA_", "OUTBOX_PRODUCER_KAFKA_")):
        assert name in CONFIG_VARIABLES or name == "OUTBOX_LOG_LEVEL", f"no setting {name}"


@_named(run_blocks("json"))
def test_json_is_valid(block: Block) -> None:
    """A block is one JSON value, or one in each line."""
    try:
        json.loads(block.text)
    except ValueError:
        for line in block.text.splitlines():
            json.loads(line)


SQL_BEFORE = {
    "docs/consumers.md": "CREATE TABLE balances (account text PRIMARY KEY, balance bigint)",
}


@_named(run_blocks("sql"))
def test_sql_runs(block: Block, database: str) -> None:
    """PostgreSQL takes the statements, beside an outbox; roles that they make are rolled back."""
    make_outbox(database)
    statements = block.text
    for role in re.findall(r"CREATE ROLE (\w+)", statements):  # roles are common to all databases of the server
        statements = re.sub(rf"\b{role}\b", f"{role}_{database[-8:]}", statements)
    with psycopg.connect(database) as connection:
        connection.execute(SQL_BEFORE.get(block.page, ""))
        connection.execute(statements)
        connection.rollback()


@_named(run_blocks("ini"))
def test_units_of_systemd_start_our_commands(block: Block) -> None:
    """A unit can be read, and its command can be parsed. Other files of this kind can be read."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block.text)
    if "Service" in unit:
        program, *arguments = shlex.split(unit["Service"]["ExecStart"])
        shell.check([Path(program).name, *arguments])


@_named(run_blocks("dockerfile"))
def test_dockerfiles_install_and_start_what_exists(block: Block) -> None:
    """Known instructions; extras, variables and the command exist."""
    check_dockerfile(block.text)


def check_dockerfile(text: str) -> None:
    """Check a Dockerfile as far as possible without an engine."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    known = {
        "FROM",
        "RUN",
        "COPY",
        "USER",
        "EXPOSE",
        "ENV",
        "ENTRYPOINT",
        "CMD",
        "WORKDIR",
        "HEALTHCHECK",
        "ARG",
        "LABEL",
    }
    assert {name for name, _ in instructions} <= known | {"STOPSIGNAL"}
    assert instructions[0][0] in {"FROM", "ARG"}
    started: list[str] = []
    for name, rest in instructions:
        if name == "RUN":
            shell.check_extras(rest)
        elif name == "ENV":
            for variable in re.findall(r"(\w+)=", rest):
                _check_variable(variable)
        elif name in {"ENTRYPOINT", "CMD"}:
            started += json.loads(rest)
    shell.check(started)
