"""The packages for executors; tests/spark/test_clusters.py unpacks and uses them."""

import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import py4j
import pyspark
import pytest

from outbox_spark.cli import main, pack

_IMPORTS = (
    "import outbox_spark.topics.ranges, outbox_spark.relay.shard_task, outbox_spark.pipelines.replay, pyarrow, fastavro"
)


def test_what_is_packed():
    """The packages of tasks, with their compiled libraries, and neither the cluster's nor the driver's own."""
    names = [name for _, name in pack._files()]
    tops = {name.partition("/")[0] for name in names}
    assert {"outbox_core", "outbox_spark", "pyarrow", "confluent_kafka", "psycopg", "psycopg_binary", "yaml"} <= tops
    assert {"fastavro", "authlib", "google"} <= tops  # values of a schema registry
    assert any(name.startswith("confluent_kafka.libs/librdkafka") for name in names) or sys.platform != "linux"
    assert tops.isdisjoint({"pyspark", "pandas", "deltalake", "pyiceberg", "pytest", "__pycache__"})
    assert len(names) == len(set(names))


def test_nothing_is_packed_but_code(monkeypatch, tmp_path):
    """A file of secrets in the folder of a package stays there."""
    (tmp_path / "outbox_core").mkdir()
    for name in ("module.py", ".env", "secrets.yaml"):
        (tmp_path / "outbox_core" / name).touch()
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "outbox_core")])
    monkeypatch.setattr(pack.importlib.util, "find_spec", lambda _: found)
    monkeypatch.setattr(pack, "_distributions", list)
    assert {Path(name).name for _, name in pack._files()} == {"module.py"}


def test_archive_that_cannot_be_written(tmp_path, capsys):
    """A folder that is not there is one line."""
    assert main(["pack", "-o", str(tmp_path / "none" / "packages.tar.gz")]) == 2
    told = (
        f"outbox-spark: error: --output {tmp_path}/none/packages.tar.gz: cannot be written: No such file or directory\n"
    )
    assert capsys.readouterr().err == told


def test_interrupted_command_is_one_line(monkeypatch, capsys):
    """Ctrl-C outside a pipeline ends in one line, with exit code 130."""
    monkeypatch.setattr(pack, "main", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["pack", "-o", "packages.tar.gz"]) == 130
    assert capsys.readouterr().err == "outbox-spark: error: interrupted\n"


@pytest.mark.complete
def test_tasks_need_no_more(tmp_path):
    """With the archive, and Spark's own packages, Python imports all that tasks need; it has less than 150 MB."""
    archive = tmp_path / "packages.tar.gz"
    assert pack.main(str(archive)) == 0
    assert archive.stat().st_size < 150e6
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "packages", filter="data")
    (tmp_path / "spark").mkdir()
    for module in (pyspark, py4j):
        own = Path(module.__file__).parent
        (tmp_path / "spark" / own.name).symlink_to(own)
    subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path += ['packages', 'spark']; {_IMPORTS}"],
                   cwd=tmp_path, check=True)  # fmt: skip
