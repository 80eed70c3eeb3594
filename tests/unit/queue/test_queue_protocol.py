"""The generated code of markers: up to date, with Go's fields, and for every protobuf that the extra allows."""

import subprocess
import sys
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest

from outbox_queue.protocol import markers as wire

ROOT = Path(__file__).resolve().parents[3]
PROTO = "outbox_queue/protocol/markers.proto"
GENERATED = ("outbox_queue/protocol/markers_pb2.py", "outbox_queue/protocol/markers_pb2.pyi")
COMPILER = ROOT / ".protoc" / "bin" / "python"


def test_generated_code_is_what_the_definition_gives(tmp_path):
    """`make protocol` would change nothing."""
    python = str(COMPILER) if COMPILER.exists() else sys.executable
    if not COMPILER.exists() and find_spec("grpc_tools") is None:
        pytest.skip("no protoc: `make protocol` installs one")
    compiler = [python, "-m", "grpc_tools.protoc"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    if "26.1" not in version:
        pytest.skip(f"another protoc generates other code: {version}")
    arguments = ["-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", PROTO]
    subprocess.run([*compiler, *arguments], cwd=ROOT, check=True)
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "run `make protocol`"


def test_fields_have_the_numbers_of_the_definition():
    """Fields 1 to 6 are Go's; the generated code has each field of the definition, with its number."""
    definition = (ROOT / PROTO).read_text().partition("message Marker {")[2]
    for field in wire.Marker.DESCRIPTOR.fields:
        assert f" {field.name} = {field.number};" in definition
    assert [field.name for field in wire.Marker.DESCRIPTOR.fields if field.number < 100] == [
        "version",
        "type",
        "message_id",
        "redeliver_after_ms",
        "key",
        "value",
    ]


def test_generated_code_runs_with_the_oldest_protobuf_that_is_allowed():
    """Generated code needs a runtime at least as new as its compiler."""
    generated = (ROOT / GENERATED[0]).read_text()
    (allowed,) = (line for line in requires("kafka-outbox") if line.startswith("protobuf"))
    assert "Protobuf Python Version: 5.26." in generated
    assert ">=5.26" in allowed
