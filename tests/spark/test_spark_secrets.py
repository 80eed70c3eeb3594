"""Secrets that each machine looks up itself."""

import pickle

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.errors import InvalidConfig
from outbox_spark.config import load_pipeline
from outbox_spark.runtime.secrets import filled, filled_harvest

_RELAY = """
harvest:
  baseKafkaConfig: {bootstrap.servers: "k:9092", sasl.password: "${file:%s}"}
  dataSource: host=db user=app password=${env:OUTBOX_TEST_PASSWORD}
relay: {shards: 2}
"""


@pytest.fixture
def secret(tmp_path):
    """Return the path of a file with a secret that has a space."""
    path = tmp_path / "secret"
    path.write_text("correct horse\n")
    return path


def test_references_are_looked_up(secret, monkeypatch):
    """A reference is a file's text without its line end, or a variable; other values stay as they are."""
    monkeypatch.setenv("OUTBOX_TEST_PASSWORD", "battery")
    settings = {"a": f"${{file:{secret}}}", "b": "x-${env:OUTBOX_TEST_PASSWORD}-y", "c": "${plain}", "d": 7}
    assert filled(settings) == {"a": "correct horse", "b": "x-battery-y", "c": "${plain}", "d": 7}


def test_what_is_not_there_is_named(tmp_path):
    """A missing file or variable is named, with its setting."""
    with pytest.raises(InvalidConfig, match=r"sasl.password: \$\{file:.*none\} cannot be read \(No such file"):
        filled({"sasl.password": f"${{file:{tmp_path}/none}}"})
    with pytest.raises(InvalidConfig, match=r"sasl.password: \$\{env:OUTBOX_TEST_NONE\} is not set on "):
        filled({"sasl.password": "${env:OUTBOX_TEST_NONE}"})


def test_an_outbox_is_handed_out_with_references(secret, tmp_path, monkeypatch):
    """The settings that tasks get have no secret; where they arrive, clients get it, quoted where libpq needs that."""
    path = tmp_path / "relay.yaml"
    path.write_text(_RELAY % secret)
    harvest = load_pipeline(path, "relay", {}).harvest
    assert b"horse" not in pickle.dumps(harvest)
    monkeypatch.setenv("OUTBOX_TEST_PASSWORD", "battery staple")
    here = filled_harvest(harvest)
    assert isinstance(here, HarvestConfig)
    assert here.base_kafka_config["sasl.password"] == "correct horse"
    assert "password='battery staple'" in here.data_source
    assert "horse" not in repr(here)
    assert "staple" not in repr(here)


def test_references_stand_where_clients_are_made(secret, tmp_path):
    """A reference in another setting is refused: nothing would look it up."""
    path = tmp_path / "relay.yaml"
    path.write_text(_RELAY % secret + "spark: {settings: {spark.x: '${file:/a}'}}\n")
    with pytest.raises(InvalidConfig, match=r"spark.settings.spark.x: \$\{file:/a\}: only `kafka`, `dsn` and `reg"):
        load_pipeline(path, "relay", {})
