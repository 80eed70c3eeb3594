"""Settings of queues: defaults, files of kafka-mq-go, and refusals."""

from datetime import timedelta

import pytest

from outbox_core.errors import InvalidConfig
from outbox_queue import InvalidMessage, QueueConfig, QueueService
from outbox_queue.protocol.clients import consumer_settings, producer_settings, transactional_settings
from outbox_queue.protocol.transaction import transactional_producer
from outbox_queue.redelivery.tracker import RedeliveryTracker

GO_FILE = """
bootstrap-servers: broker:9092
message-topic: tasks
marker-topic: task-markers
redelivery-timeout: 10000
consumer-receive-buffer-capacity: 7
consumer-next-message-timeout: 1500
consumer-max-messages-per-commit: 11
redelivery-tracker:
  use-now-if-no-marker-seen: 12000
  num-offsets-per-commit: 13
"""


def test_every_setting_of_the_go_version_is_read(tmp_path):
    """A file of kafka-mq-go is accepted as it is, its numbers being milliseconds."""
    path = tmp_path / "config.yaml"
    path.write_text(GO_FILE)
    config = QueueConfig.from_yaml(path)
    assert config.bootstrap_servers == "broker:9092"
    assert (config.message_topic, config.marker_topic) == ("tasks", "task-markers")
    assert config.redelivery_timeout == timedelta(seconds=10)
    assert config.receive_buffer_capacity == 7
    assert config.next_message_timeout == timedelta(milliseconds=1500)
    assert config.max_messages_per_commit == 11
    assert config.redelivery_tracker.use_now_if_no_marker_seen == timedelta(seconds=12)
    assert config.redelivery_tracker.num_offsets_per_commit == 13


def test_what_a_file_leaves_out_has_real_defaults(tmp_path):
    """A file has to name the servers only; its missing settings get their defaults, not zero."""
    path = tmp_path / "config.yaml"
    path.write_text("bootstrap-servers: broker:9092\nredelivery_timeout: 1m30s\n")
    config = QueueConfig.from_yaml(path)
    assert config.redelivery_timeout == timedelta(seconds=90)
    assert config.receive_buffer_capacity > 0
    assert config.redelivery_tracker.num_offsets_per_commit > 0
    assert config.dead_letters == "messages-dead-letters"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"redelivery_timeout": "13h"}, "redelivery_timeout: must be between 100ms and 12h"),
        ({"redelivery_timeout": 5}, "redelivery_timeout: a duration needs a unit"),
        ({"redelivery_timeot": "5s"}, "did you mean redelivery_timeout"),
        ({"message_topic": "a b"}, "message_topic: is not a topic name"),
        ({"message_topic": "markers"}, "must be different ones"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_in_progress": True}, "max_in_progress: must be a whole number"),
        ({"marker_key": "partition"}, "marker_key"),
        ({"bootstrap_servers": ""}, "bootstrap_servers: is empty"),
        ({"bootstrap_servers": " , "}, "bootstrap_servers: is empty; write for example"),
        ({"max_delay": "4d"}, "max_delay"),
        ({"max_delay": "100h", "marker_retention": "7h"}, "max_delay: must not be more than half of marker_retention"),
        ({"max_processing_time": "1s"}, "max_processing_time: must not be less than redelivery_timeout"),
        ({"kafka": {"group.id": "x"}}, r"kafka\.group\.id: cannot be set"),
        ({"kafka": {"partition.assignment.strategy": "cooperative-sticky"}}, "other members, Go's included"),
        ({"kafka": {"bootstrap.servers": "x"}}, "is the setting `bootstrap_servers`"),
        ({"kafka": {"sasl": {"username": "x"}}}, "must be a single value"),
        ({"transaction_timeout": "500ms"}, "transaction_timeout: must be between 1s and 15m"),
        ({"transaction_timeout": "16m"}, "transaction_timeout: must be between 1s and 15m"),
        ({"kafka": {"socket.timeout.ms": 10_001}}, r"socket\.timeout\.ms: must be .* no more than transaction_timeout"),
        ({"kafka": {"socket.timeout.ms": "long"}}, r"socket\.timeout\.ms: must be a number"),
        ({"redelivery_tracker": {"num_offsets_per_commit": 0}}, r"redelivery_tracker\.num_offsets_per_commit"),
    ],
)
def test_bad_settings_are_named(settings, problem):
    """A wrong or unknown setting, or one of the protocol's own, raises InvalidConfig with its name."""
    with pytest.raises(InvalidConfig, match=problem):
        QueueConfig(**{"bootstrap_servers": "broker:9092", **settings})


def test_bad_files_are_named(tmp_path):
    """A file that is no mapping, or has a wrong setting, is named with the setting."""
    path = tmp_path / "config.yaml"
    for text, problem in (("[1]", "must be a mapping"), ("bootstrap-servers: b\nmessage-topic: ''", "message_topic")):
        path.write_text(text)
        with pytest.raises(InvalidConfig, match=f"{path}.*{problem}"):
            QueueConfig.from_yaml(path)


def test_secrets_are_not_shown():
    """Neither `repr` nor an error shows the password."""
    config = QueueConfig(bootstrap_servers="broker:9092", kafka={"sasl.password": "hunter2"})
    assert "hunter2" not in repr(config)
    with pytest.raises(InvalidConfig) as error:
        QueueConfig(bootstrap_servers="broker:9092", kafka={"sasl.password": {"a": "hunter2"}})
    assert "hunter2" not in str(error.value)


def test_clients_have_what_the_protocol_needs():
    """Users' properties reach every client, but cannot change idempotence, isolation and manual commits."""
    config = QueueConfig(bootstrap_servers="broker:9092", kafka={"security.protocol": "SSL", "linger.ms": 50})
    producer, consumer = producer_settings(config), consumer_settings(config, "g")
    transactional = transactional_settings(config, "t")
    for settings in (producer, consumer, transactional):
        assert settings["security.protocol"] == "SSL"
        assert settings["bootstrap.servers"] == "broker:9092"
    assert (producer["enable.idempotence"], producer["acks"], producer["linger.ms"]) == (True, "all", 50)
    assert (consumer["isolation.level"], consumer["enable.auto.commit"]) == ("read_committed", False)
    assert "partition.assignment.strategy" not in consumer
    assert consumer_settings(config, "g")["topic.metadata.refresh.interval.ms"] == 30_000
    assert consumer_settings(config, "g")["session.timeout.ms"] == 10_000
    assert consumer_settings(config, "g")["max.poll.interval.ms"] == 45_000
    patient = QueueConfig(bootstrap_servers="broker:9092", kafka={"session.timeout.ms": 30_000})
    assert consumer_settings(patient, "g")["session.timeout.ms"] == 30_000
    assert "max.poll.interval.ms" not in consumer_settings(patient, "g")
    assert transactional["transaction.timeout.ms"] > transactional["delivery.timeout.ms"]


@pytest.mark.parametrize("timeout", ["1s", "10s", "15m"])
@pytest.mark.parametrize("socket_timeout", [None, "1000"])
def test_settings_that_are_taken_make_transactional_clients(timeout, socket_timeout):
    """The client accepts every transaction_timeout within its bounds."""
    kafka = {} if socket_timeout is None else {"socket.timeout.ms": socket_timeout}
    config = QueueConfig(bootstrap_servers="localhost:1", transaction_timeout=timeout, kafka=kafka)
    transactional_producer(transactional_settings(config, "t"))


def test_a_tracker_tells_at_its_start_what_the_client_refuses():
    """A setting that no transactional client takes is an error at the tracker's start, not at the first redelivery."""
    config = QueueConfig(bootstrap_servers="localhost:1", kafka={"linger.ms": -1})
    with pytest.raises(InvalidConfig, match=r"queue\.buffering\.max\.ms"):
        RedeliveryTracker(config).start()


def test_a_queue_has_settings_of_its_own():
    """A queue's settings are checked, and those of the whole service are refused."""
    service = QueueService(QueueConfig(bootstrap_servers="broker:9092"))
    queue = service.queue("q", max_attempts=None, redelivery_timeout="5s")
    assert (queue.config.max_attempts, queue.config.redelivery_timeout) == (None, timedelta(seconds=5))
    assert service.config.max_attempts is not None
    with pytest.raises(InvalidConfig, match="marker_topic: a queue can have of its own"):
        service.queue("q", marker_topic="other")
    with pytest.raises(InvalidConfig, match="max_attempts"):
        service.queue("q", max_attempts=-1)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 201, None, b"q", "\ud800", "redelivery"])
def test_a_bad_name_of_a_queue_is_refused(name):
    """A name that cannot become a record key and a group's id is refused."""
    with pytest.raises(InvalidMessage, match="queue's name"):
        QueueService(QueueConfig(bootstrap_servers="broker:9092")).queue(name)


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5, "2", None])
def test_a_bad_concurrency_is_refused(concurrency):
    """A wrong concurrency is refused before any connection."""
    queue = QueueService(QueueConfig(bootstrap_servers="broker:9092")).queue("q")
    with pytest.raises(InvalidMessage, match="concurrency"):
        queue.run(print, concurrency=concurrency)


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"redelivery_timeout": "40s"}, True),
        ({"redelivery_timeout": "41s"}, False),
        ({"redelivery_timeout": "40s", "transaction_timeout": "9s"}, False),
        ({"redelivery_timeout": "10s", "marker_key": "message"}, False),
        ({"redelivery_timeout": "10s", "transactional": False}, False),
    ],
)
def test_a_short_timeout_with_transactions_and_go_trackers_is_warned_of(settings, is_warned, caplog):
    """Beside Go trackers, a timeout that does not outlast two transactions is warned of."""
    QueueConfig(bootstrap_servers="nowhere:1", **{"transactional": True, "marker_key": "queue", **settings})
    assert ["should be more than" in line for line in caplog.messages] == [True] * is_warned
