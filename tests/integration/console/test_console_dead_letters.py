"""Dead letters in the console: the newest of the topic, and one that is stashed anew after an edit."""

import json

import pytest
from confluent_kafka import Producer

from outbox_core.console import Console, User
from outbox_core.console.access import EVERYTHING
from tests.integration.console.console_fixtures import Browser, asking, scene

__all__ = ["scene"]

LETTERS = (
    ("orders", "k1", b'{"total": 1e400}', "too large"),
    ("refunds", "k2", b"\xff", "no topic"),
    ("orders", None, None, "no topic"),
)


@pytest.fixture
def letters(scene, kafka_bootstrap, make_topic):
    """Write dead letters as a harvester does; return the browser of a console of them."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number, (origin, key, value, error) in enumerate(LETTERS):
        headers = [("trace", b"a\xff"), ("outbox-original-topic", origin), ("outbox-error", error)]
        producer.produce(topic, value, key, 0, headers=[*headers, ("outbox-id", f"shop.public.outbox:{number + 7}")])
    assert producer.flush(60) == 0
    config = scene.config(base_kafka_config={"bootstrap.servers": kafka_bootstrap}, dead_letter_topic=topic)
    browser = Browser(asking(Console({"shop": config}), User("alice", EVERYTHING)))
    browser.topic = topic
    return browser


def test_the_newest_are_shown(letters):
    """Letters come newest first, with where they were to go and why not; one topic's if that is wanted."""
    document = letters.data("dead-letters")
    shown = [(one["offset"], one["original_topic"], one["key"], one["error"]) for one in document["letters"]]
    assert shown == [
        ("2", "orders", None, "no topic"),
        ("1", "refunds", "k2", "no topic"),
        ("0", "orders", "k1", "too large"),
    ]
    assert document["dead_letter_topic"] == letters.topic
    assert [one["offset"] for one in letters.data("dead-letters", "topic=orders")["letters"]] == ["2", "0"]
    assert letters.data("dead-letters", "limit=1")["is_cut"]
    (header,) = document["letters"][2]["headers"]
    assert (header[0], header[1]["kind"]) == ("trace", "binary")
    assert document["letters"][2]["record_id"] == "7"


def test_one_letter(letters):
    """One letter is shown as it is; one that is not there is not found."""
    letter = letters.data("dead-letters/0/0")
    assert letter["value"]["text"] == '{"total": 1e400}'
    for place in ("0/3", "0/-1", "1/0", "0/99999999999"):
        assert letters.get(f"dead-letters/{place}")[0] == 404, place


def test_a_letter_is_stashed_anew(scene, letters):
    """An edited letter becomes a record that says whence it is; a second time only if that is meant."""
    record = {
        "topic": "orders",
        "key": "k9",
        "value": {"text": '{"total": 5}'},
        "headers": [["trace", {"base64": "Yf8="}], ["outbox-error", {"text": "forged"}], ["gone", None]],
    }
    body = {"reason": "the total was wrong", "letter": {"partition": 0, "offset": "0"}, "record": record}
    assert letters.act("restash", {**body, "dry_run": True})[0] == 200
    assert scene.rows() == []
    status, document = letters.act("restash", body)
    assert (status, document["count"]) == (200, 1)
    (row,) = scene.rows()
    assert (row.kafka_topic, row.kafka_key, row.kafka_value) == ("orders", "k9", b'{"total": 5}')
    assert str(row.id) == document["record_id"]
    headers = dict(zip(row.kafka_header_keys, row.kafka_header_values, strict=True))
    assert headers == {"trace": b"a\xff", "gone": None, "outbox-restash": f"{letters.topic}:0:0".encode()}
    event = letters.data("events", "kinds=restashed")["events"][0]
    assert event["reason"] == f"dead letter {letters.topic}[0]@0: the total was wrong"
    assert (event["actor"], event["record_id"]) == ("alice as postgres", str(row.id))
    restashed = {one["offset"]: one["restashed"] for one in letters.data("dead-letters")["letters"]}
    assert restashed["0"]["by"] == "alice as postgres"
    assert restashed["1"] is None
    status, document = letters.act("restash", body)
    assert (status, document["error"]["code"]) == (409, "already_restashed")
    assert document["error"]["by"] == "alice as postgres"
    assert len(scene.rows()) == 1
    assert letters.act("restash", {**body, "force": True})[0] == 200
    assert len(scene.rows()) == 2


def test_a_letter_that_is_not_there_is_not_stashed(scene, letters):
    """Only a letter that Kafka has is stashed anew."""
    record = {"topic": "orders", "key": "k", "value": None}
    body = {"reason": "r", "letter": {"partition": 0, "offset": "3"}, "record": record}
    assert letters.act("restash", body)[0] == 404
    assert scene.rows() == []


def test_kafka_that_is_away_is_told_as_data(scene):
    """Without Kafka the dead letters are unknown, with the reason."""
    browser = Browser(asking(Console({"shop": scene.config()}), User("alice", EVERYTHING)))
    status, document = browser.get("dead-letters")
    assert status == 200
    assert document["unavailable"]["service"] == "kafka"
    assert json.dumps(document)
