"""`outbox queue` on a real broker: its counts, peeks, dead letters and errors."""

import json
import urllib.error
import urllib.request

import pytest

from outbox_core.cli import main
from outbox_core.kafka.clients import make_producer
from outbox_queue import QueueService
from outbox_queue.dead_letters.store import DeadLetters
from outbox_queue.errors import QueueError
from outbox_queue.operations import command
from outbox_queue.operations.stats import queue_stats
from outbox_queue.protocol.clients import producer_settings
from outbox_queue.protocol.headers import dead_letter_record
from outbox_queue.protocol.topics import ensure_topics
from tests.queueing import Markers, eventually, messages_in, queue_config

pytestmark = pytest.mark.real_broker


@pytest.fixture
def config(kafka_bootstrap, make_topic, monkeypatch):
    """Queues with new topics, and no settings in the environment."""
    for name in ("OUTBOX_KAFKA_BOOTSTRAP", "OUTBOX_POSTGRES_DSN"):
        monkeypatch.delenv(name, raising=False)
    return queue_config(kafka_bootstrap, make_topic)


@pytest.fixture
def outbox(config, capsys):
    """Return a function that runs `outbox queue ...` on these queues and returns exit code, output and errors."""

    def run(*arguments):
        settings = ["--bootstrap-servers", config.bootstrap_servers, "--message-topic", config.message_topic]
        settings += ["--marker-topic", config.marker_topic, "--dead-letter-topic", config.dead_letters]
        code = main(["queue", *arguments, *settings])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def bury(config):
    """Return a function that writes dead letters of a queue; each number becomes the id `0-number`."""

    def write(queue, numbers, *, partition=-1, reason="no such customer", dead_at_ms=2000):
        producer = make_producer(producer_settings(config))
        for number in numbers:
            key, value, headers = dead_letter_record(
                queue.encode(),
                b"payload %d" % number,
                headers=[("h", b"1")],
                attempts=3,
                enqueued_at_ms=1000,
                origin=(0, number),
                reason=reason,
                dead_at_ms=dead_at_ms,
            )
            producer.produce(config.dead_letters, value, key, partition, headers=headers)
        assert producer.flush(30) == 0

    return write


def lines(output):
    """Return the objects of a `--json` output."""
    return [json.loads(line) for line in output.splitlines()]


def test_stats_count_what_waits_is_in_progress_and_dead(config, outbox, bury):
    """Each queue's waiting, started and dead messages are counted separately."""
    with QueueService(config).queue("a").producer() as producer:
        for number in range(5):
            producer.send(b"%d" % number)
    markers = Markers(config.bootstrap_servers, config.marker_topic)
    for number in range(3):
        markers.start(number, queue=b"b")
    markers.end(0)
    markers.flush()
    bury("a", [1])
    code, output, _ = outbox("stats", "--json")
    found = {row["queue"]: row for row in lines(output) if row["queue"] in ("a", "b")}
    assert code == 0
    assert (found["a"]["waiting"], found["a"]["in_progress"], found["a"]["dead_letters"]) == (5, 0, 1)
    assert (found["b"]["waiting"], found["b"]["in_progress"], found["b"]["dead_letters"]) == (0, 2, 0)
    assert found["a"]["oldest_unfinished_seconds"] is None
    assert 0 <= found["b"]["oldest_unfinished_seconds"] < 600
    assert "IN PROGRESS" in outbox("stats", "--queue", "a")[1]


def test_stats_leave_out_what_was_taken(config, topic_name):
    """Messages that a consumer has acknowledged are counted neither as waiting nor as in progress."""
    queue = QueueService(config).queue(topic_name("q"))
    with queue.producer() as producer:
        for number in range(10):
            producer.send(b"%d" % number)
    with queue.consumer() as consumer:
        for _ in range(10):
            consumer.receive().ack()
    eventually(lambda: queue_stats(config, queue.name)[0][1:] == (0, 0, None, 0))


def test_peek_shows_and_takes_nothing(config, outbox):
    """Peek shows waiting messages whole as JSON, again and again, and messages in progress up to the limit."""
    with QueueService(config).queue("a").producer() as producer:
        producer.send(b"\xff\x00", headers={"n": b"1"})
    first = lines(outbox("peek", "--queue", "a", "--json")[1])
    assert first == lines(outbox("peek", "--queue", "a", "--json")[1])
    assert first[0]["payload"] == {"base64": "/wA="}
    assert first[0]["headers"] == [["n", "1"]]
    assert first[0]["attempt"] == 1
    assert outbox("peek", "--queue", "other", "--json")[1] == ""
    markers = Markers(config.bootstrap_servers, config.marker_topic)
    for number in range(3):
        markers.start(number, queue=b"a", attempt=2, origin=(3, 4))
    markers.flush()
    shown = lines(outbox("peek", "--queue", "a", "--in-progress", "--limit", "2", "--json")[1])
    assert [(one["id"], one["attempt"]) for one in shown] == [("3-4", 2), ("3-4", 2)]
    assert "payload" in outbox("peek", "--queue", "a", "--in-progress")[1]


def test_dead_letters_are_listed_requeued_and_discarded(config, outbox, bury):
    """Each dead letter is handled once: requeued or discarded."""
    bury("a", range(4))
    bury("b", [9])
    assert [one["id"] for one in lines(outbox("dead-letters", "--queue", "b", "--json")[1])] == ["0-9"]
    assert "no such customer" in outbox("dead-letters")[1]
    assert outbox("dead-letters", "requeue", "--id", "0-1", "--id", "0-2")[:2] == (0, "requeued 2 messages\n")
    assert outbox("dead-letters", "discard", "--id", "0-3")[:2] == (0, "discarded 1 message\n")
    code, _, error = outbox("dead-letters", "requeue", "--id", "0-1")
    assert (code, error) == (1, "outbox: error: no such dead letter: 0-1\n")
    assert outbox("dead-letters", "--queue", "a", "requeue", "--all")[1] == "requeued 1 message\n"
    assert [one["id"] for one in lines(outbox("dead-letters", "--json")[1])] == ["0-9"]
    assert messages_in(config) == {b"payload %d" % number: [1] for number in range(3)}


def test_all_dead_letters_are_discarded_only_if_that_is_meant(config, outbox, bury, monkeypatch):
    """`discard --all` wants --yes, or an answer on a terminal, and takes what was shown; --dry-run does nothing."""
    bury("a", range(3))
    code, _, error = outbox("dead-letters", "discard", "--all")
    assert (code, error.count("\n")) == (2, 1)
    assert "this deletes 3 messages for good; say --yes" in error
    for verb in ("discard", "requeue"):
        code, out, _ = outbox("dead-letters", verb, "--all", "--dry-run")
        assert (code, out.splitlines()[-1], len(out.splitlines())) == (0, f"would {verb} 3 messages", 5)
    monkeypatch.setattr(command, "asker", lambda: lambda _: False)
    assert outbox("dead-letters", "discard", "--id", "0-1")[::2] == (1, "outbox: error: nothing was discarded\n")
    assert len(DeadLetters(config).all()) == 3

    def agree(question):
        assert "Delete 3 messages for good?" in question
        bury("a", [7])
        return True

    monkeypatch.setattr(command, "asker", lambda: agree)
    assert outbox("dead-letters", "discard", "--all")[1].splitlines()[-1] == "discarded 3 messages"
    assert [letter.id for letter in DeadLetters(config).all()] == ["0-7"]
    assert outbox("dead-letters", "discard", "--all", "--yes")[:2] == (0, "discarded 1 message\n")


def test_a_requeued_message_keeps_its_id_and_headers(config, bury, topic_name):
    """A requeued message is attempt 1, with its old id and headers."""
    queue = QueueService(config).queue(topic_name("q"))
    bury(queue.name, [7])
    DeadLetters(config).requeue(lambda _: True)
    with queue.consumer() as consumer:
        message = consumer.receive()
        assert (message.id, message.attempt, message.payload) == ("0-7", 1, b"payload 7")
        assert message.header("h") == b"1"
        message.ack()


def test_what_strangers_write_is_shown_and_sent_again(config, outbox):
    """Escape sequences, impossible times and malformed ids neither reach the terminal nor stop a command."""
    bad = [("kmq-queue", b"evil\x1b]0;\x9b"), ("kmq-reason", b"\x1b[2J\nq\t7"), ("kmq-dead-at", b"9" * 18)]
    ids = [[("kmq-id", b"-1--5"), ("kmq-enqueued-at", b"9" * 18)], [("kmq-enqueued-at", b"9" * 5000)], bad, []]
    producer = make_producer(producer_settings(config))
    for number, headers in enumerate(ids):
        producer.produce(config.dead_letters, b"\x1b[31m", b"key\x1b%d" % number, headers=headers)
    producer.produce(config.message_topic, b"x", b"jobs", headers=[("kmq-enqueued-at", b"9" * 18)])
    assert producer.flush(30) == 0
    for arguments in (["dead-letters"], ["dead-letters", "--json"], ["stats"], ["peek", "--queue", "jobs"]):
        code, out, _ = outbox(*arguments)
        assert code == 0
        assert all(character.isprintable() for character in out.replace("\n", ""))
    assert len(outbox("dead-letters")[1].splitlines()) == 1 + len(ids)
    assert "9999-12-31" in outbox("dead-letters")[1]
    assert outbox("dead-letters", "requeue", "--all")[:2] == (0, "requeued 4 messages\n")


def test_a_message_whose_consumer_and_tracker_wrote_a_dead_letter_is_requeued_once(config, outbox, bury):
    """Two letters of one message, in two partitions, are one with the last reason: listed, counted and sent once."""
    ensure_topics(config)
    bury("a", [1], partition=0, reason="rejected", dead_at_ms=2000)
    bury("a", [1, 2], partition=1, reason="was not finished in 3 attempts", dead_at_ms=3000)
    found = {one["id"]: one["reason"] for one in lines(outbox("dead-letters", "--json")[1])}
    assert found == dict.fromkeys(["0-1", "0-2"], "was not finished in 3 attempts")
    assert lines(outbox("stats", "--json")[1])[0]["dead_letters"] == 2
    assert outbox("dead-letters", "requeue", "--id", "0-1")[:2] == (0, "requeued 1 message\n")
    assert messages_in(config) == {b"payload 1": [1]}
    assert [one["id"] for one in lines(outbox("dead-letters", "--json")[1])] == ["0-2"]


def test_a_dead_letter_that_was_never_handed_out_has_no_attempts(config, outbox):
    """A dead letter that was too large to be started shows 0 attempts, not 1."""
    producer = make_producer(producer_settings(config))
    key, value, headers = dead_letter_record(
        b"jobs", b"", headers=(), attempts=0, enqueued_at_ms=1, origin=(0, 1), reason="too large", dead_at_ms=2
    )
    producer.produce(config.dead_letters, value, key, headers=headers)
    assert producer.flush(30) == 0
    assert lines(outbox("dead-letters", "--json")[1])[0]["attempts"] == 0


def test_of_two_commands_at_a_time_one_is_fenced(config, bury):
    """A requeue that another one overtakes repeats no message, and raises an error."""
    bury("a", range(3))

    def overtake(letter):
        if letter.id == "0-0":
            DeadLetters(config).requeue(lambda _: True)
        return True

    with pytest.raises(QueueError, match="run it again"):
        DeadLetters(config).requeue(overtake)
    assert messages_in(config) == {b"payload %d" % number: [1] for number in range(3)}
    assert DeadLetters(config).all() == []


def test_errors_are_one_line(config, capsys, tmp_path):
    """Errors in settings, topics or files are one line, with exit code 2."""
    assert main(["queue", "stats"]) == 2
    assert "pass --bootstrap-servers" in capsys.readouterr().err
    assert main(["queue", "--bootstrap-servers", config.bootstrap_servers, "stats", "--message-topic", "no-such"]) == 2
    assert "no-such" in capsys.readouterr().err
    file = tmp_path / "queue.yaml"
    file.write_text(f"bootstrap-servers: {config.bootstrap_servers}\nredelivery-timeot: 5\n")
    assert main(["queue", "stats", "-f", str(file)]) == 2
    error = capsys.readouterr().err
    assert "redelivery-timeot" in error
    assert error.count("\n") == 1
    assert main(["queue", "--bootstrap-servers", "127.0.0.1:1", "stats"]) == 2
    assert "cannot reach Kafka at bootstrap.servers=127.0.0.1:1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["queue", "dead-letters", "requeue"])
    assert "--all" in capsys.readouterr().err


def test_a_tracker_serves_its_numbers_and_health(config):
    """`/metrics` shows the messages in progress; `/healthz` is ok while the tracker runs, and fails afterwards."""
    from outbox_core.metrics import MetricsServer
    from outbox_queue.redelivery.tracker import RedeliveryTracker

    tracker = RedeliveryTracker(config)
    with MetricsServer("127.0.0.1", 0, tracker.metrics.registry, tracker.health) as server:
        url = f"http://127.0.0.1:{server.port}"
        with tracker:
            markers = Markers(config.bootstrap_servers, config.marker_topic)
            markers.start(1)
            markers.flush()
            eventually(lambda: b'outbox_queue_in_progress{queue="q"} 1.0' in fetch(f"{url}/metrics"))
            assert json.loads(fetch(f"{url}/healthz"))["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            fetch(f"{url}/healthz")


def fetch(url):
    """Return the body of a page."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  our own server
        return answer.read()
