"""Dead letters in the console: the newest of the topic, and one that is stashed anew after an edit."""

import json
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from outbox_core.console import Console, User, dead_letters, outboxes, values
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


def _console(scene, kafka_bootstrap, topic):
    config = scene.config(base_kafka_config={"bootstrap.servers": kafka_bootstrap}, dead_letter_topic=topic)
    return Browser(asking(Console({"shop": config}), User("alice", EVERYTHING)))


def test_letters_of_many_headers(scene, kafka_bootstrap, make_topic):
    """Of each the first headers are listed, cut, with their number: the answer stays small, and tells what it lacks."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "compression.type": "zstd"})
    for number in range(5):
        headers = [("outbox-original-topic", "orders"), ("n" * 5000, b"v" * 5000), *[("a", b"")] * 30_000]
        producer.produce(topic, b"v", b"k" * 50_000, headers=[*headers, ("outbox-error", f"{number}" * 9000)])
    assert producer.flush(60) == 0
    browser = _console(scene, kafka_bootstrap, topic)
    document = browser.data("dead-letters")
    assert [one["offset"] for one in document["letters"]] == ["4", "3", "2", "1", "0"]
    assert (document["is_cut"], document["left_out"]) == (False, "")
    assert len(json.dumps(document)) < 200_000
    newest = document["letters"][0]
    assert (len(newest["headers"]), newest["header_count"], newest["is_whole"]) == (20, 30_001, False)
    assert newest["headers"][0][1]["size_bytes"] == 5000
    assert newest["headers"][0][1]["is_cut"]
    whole = browser.data("dead-letters/0/4")
    assert (len(whole["headers"]), whole["header_count"], whole["is_whole"]) == (1000, 30_001, False)
    assert len(whole["key"]) == 50_000


def test_one_letter_has_a_size(scene, kafka_bootstrap, make_topic):
    """Of a letter that is shown alone, too, only as many headers are shown as one answer may have, and it says so."""
    topic = make_topic(1)
    producer = Producer(
        {"bootstrap.servers": kafka_bootstrap, "compression.type": "gzip", "message.max.bytes": 50_000_000}
    )
    producer.produce(topic, b"v", headers=[(f"h{number}", b"a" * 500_000) for number in range(20)])
    assert producer.flush(60) == 0
    document = _console(scene, kafka_bootstrap, topic).data("dead-letters/0/0")
    assert len(json.dumps(document)) < 2_200_000
    assert [value["is_cut"] for _, value in document["headers"]] == [False] * 4 + [True]
    assert (document["header_count"], document["is_whole"]) == (20, False)


def test_letters_that_were_compressed(kafka_bootstrap, make_topic):
    """The client takes them one by one: letters of some kilobytes may have become gigabytes."""
    topic = make_topic(1)
    settings = {"compression.type": "gzip", "batch.num.messages": 1, "message.max.bytes": 10_000_000}
    producer = Producer({"bootstrap.servers": kafka_bootstrap, **settings})
    for _ in range(30):
        producer.produce(topic, b"a" * 5 * 2**20, partition=0)
    assert producer.flush(60) == 0
    told = []
    config = SimpleNamespace(base_kafka_config={"bootstrap.servers": kafka_bootstrap}, name="shop")
    settings = dead_letters._settings(SimpleNamespace(config=config))
    consumer = Consumer({**settings, "statistics.interval.ms": 20, "stats_cb": told.append})
    consumer.assign([TopicPartition(topic, 0, 0)])
    read = 0
    give_up_at = time.monotonic() + 60
    while read < 30 and time.monotonic() < give_up_at:
        read += len(consumer.consume(1, 0.1))
        time.sleep(0.05)  # for the client to fetch
    consumer.close()
    partitions = [json.loads(text)["topics"].get(topic, {}).get("partitions", {}).get("0", {}) for text in told]
    assert read == 30
    assert 5 * 2**20 <= max(partition.get("fetchq_size", 0) for partition in partitions) <= 20 * 2**20


def test_who_reads_one_letter_waits_for_a_place(scene, kafka_bootstrap, make_topic, monkeypatch):
    """Letters are read for few at a time, one alone as lists."""
    monkeypatch.setattr(dead_letters, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(outboxes, "_LETTER_READERS", 0)
    _, document = _console(scene, kafka_bootstrap, make_topic(1)).get("dead-letters/0/0")
    assert "being read for others" in document["unavailable"]["reason"]


def test_an_answer_has_a_size(scene, kafka_bootstrap, make_topic, monkeypatch):
    """Letters that do not fit into one answer are left out, the oldest, and it says so."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for _ in range(20):
        producer.produce(topic, b"v" * 400, b"k" * 4000)
    assert producer.flush(60) == 0
    monkeypatch.setattr(values, "_ANSWER_BYTES", 20_000)
    document = _console(scene, kafka_bootstrap, topic).data("dead-letters")
    assert [one["offset"] for one in document["letters"]] == ["19", "18", "17", "16"]
    assert (document["is_cut"], document["left_out"]) == (True, "the others are too large for one answer")


def test_letters_that_take_too_long(scene, kafka_bootstrap, make_topic, monkeypatch):
    """When the time is over what was read is shown, and why it is not all; a letter that is there is not missing."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for _ in range(30):
        producer.produce(topic, b"v")
    assert producer.flush(60) == 0
    browser = _console(scene, kafka_bootstrap, topic)
    monkeypatch.setattr(dead_letters, "_READ_SECONDS", -1.0)
    document = browser.data("dead-letters")
    assert (document["letters"], document["is_cut"]) == ([], True)
    assert "reading took more than" in document["left_out"]
    status, document = browser.get("dead-letters/0/0")
    assert (status, document["data"]) == (200, None)
    assert "was not read within" in document["unavailable"]["reason"]
    record = {"topic": "orders", "key": "k", "value": None}
    status, document = browser.act(
        "restash", {"reason": "r", "letter": {"partition": 0, "offset": "0"}, "record": record}
    )
    assert (status, document["error"]["code"]) == (503, "unavailable")


def test_letters_behind_an_open_transaction(scene, kafka_bootstrap, make_topic):
    """Those before it are shown, those behind it are not said to be missing; when it has ended all are there."""
    topic = make_topic(1)
    open_ = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": topic})
    open_.init_transactions()
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(topic, b"before")
    assert producer.flush(60) == 0
    open_.begin_transaction()
    open_.produce(topic, b"open")
    assert open_.flush(60) == 0
    producer.produce(topic, b"behind")
    assert producer.flush(60) == 0
    browser = _console(scene, kafka_bootstrap, topic)
    document = browser.data("dead-letters")
    assert [one["value"]["text"] for one in document["letters"]] == ["before"]
    assert document["is_cut"]
    assert "a transaction is open in partition 0 since offset 1" in document["left_out"]
    _, hidden = browser.get("dead-letters/0/2")
    assert "a transaction is open" in hidden["unavailable"]["reason"]
    open_.abort_transaction()
    document = browser.data("dead-letters")
    assert [one["value"]["text"] for one in document["letters"]] == ["behind", "before"]
    assert (document["is_cut"], document["left_out"]) == (False, "")
    assert browser.get("dead-letters/0/1")[0] == 404


def test_a_topic_is_read_backwards(scene, kafka_bootstrap, make_topic, monkeypatch):
    """Of many letters the newest are read, in both partitions, and older ones of a topic that is asked for."""
    monkeypatch.setattr(dead_letters, "MOST_READ", 300)
    topic = make_topic(2)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(400):
        origin = "refunds" if number < 300 else "orders"
        headers = [("outbox-original-topic", origin)]
        producer.produce(
            topic, b"%d" % number, partition=number % 2, headers=headers, timestamp=1_700_000_000_000 + number
        )
    assert producer.flush(60) == 0
    browser = _console(scene, kafka_bootstrap, topic)
    document = browser.data("dead-letters", "limit=30")
    assert [int(one["value"]["text"]) for one in document["letters"]] == list(range(399, 369, -1))
    document = browser.data("dead-letters", "limit=30&topic=refunds")
    assert [int(one["value"]["text"]) for one in document["letters"]] == list(range(299, 269, -1))
    document = browser.data("dead-letters", "limit=200&topic=refunds")
    assert (len(document["letters"]), document["left_out"]) == (200, "only the newest 300 of the topic were read")


def test_a_letter_of_another_outbox(letters, kafka_bootstrap):
    """It is marked: whoever may write rows of another outbox can make one. This outbox's own is not."""
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    own = letters.get("status")[1]["outbox"]
    producer.produce(letters.topic, b"v", partition=0, headers=[("outbox-id", f"{own}:1".encode())])
    assert producer.flush(60) == 0
    marks = [one["foreign_outbox"] for one in letters.data("dead-letters")["letters"]]
    assert marks == [None, *["shop.public.outbox"] * 3]
    assert letters.data("dead-letters/0/0")["foreign_outbox"] == "shop.public.outbox"


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
