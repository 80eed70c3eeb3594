"""The plans that a relay hands out have no secrets."""

import pickle
import threading

import pytest

from outbox_spark.pipelines import relay
from outbox_spark.pipelines.relay import RelayConfig, run_relay

pytestmark = pytest.mark.real_broker


def test_tasks_get_references(scene, make_topic, monkeypatch):
    """The driver connects with the secret; what it sends to tasks has the reference alone."""
    monkeypatch.setenv("OUTBOX_TEST_PASSWORD", "battery-staple")
    reference, plans, stopping = "${env:OUTBOX_TEST_PASSWORD}", [], threading.Event()

    def publish(_, plan, __):
        plans.append(plan)
        stopping.set()

    monkeypatch.setattr(relay, "publish", publish)
    scene.fill(make_topic(), 3)
    kafka = {"bootstrap.servers": scene.bootstrap, "sasl.password": reference}
    config = scene.config(delivery="exactly-once", base_kafka_config=kafka)
    run_relay(None, RelayConfig(harvest=config), stopping=stopping)
    assert plans[0].harvest.base_kafka_config["sasl.password"] == reference
    assert b"battery" not in pickle.dumps(plans[0])
