"""Message queues with individual acknowledgement over two Kafka topics, wire-compatible with kafka-mq-go.

    service = QueueService(QueueConfig(bootstrap_servers="localhost:9092"))
    queue = service.queue("emails")
    with queue.producer() as producer:
        producer.send({"to": "ada@example.org"})
    with queue.consumer() as consumer:
        for message in consumer:
            message.ack()

A redelivery tracker (`outbox queue tracker`) has to run somewhere. Needs the extra `[queue]`.
"""

from outbox_queue.config import QueueConfig, TrackerConfig
from outbox_queue.consuming.consumer import Consumer
from outbox_queue.consuming.message import Message
from outbox_queue.consuming.worker import backoff
from outbox_queue.errors import (
    InvalidMessage,
    MessageSettled,
    MessageTooLarge,
    QueueClosed,
    QueueError,
    QueueTopicError,
    Reject,
    SendFailed,
)
from outbox_queue.metrics import QueueMetrics
from outbox_queue.producing.producer import Producer
from outbox_queue.service import Queue, QueueService

__all__ = [
    "Consumer",
    "InvalidMessage",
    "Message",
    "MessageSettled",
    "MessageTooLarge",
    "Producer",
    "Queue",
    "QueueClosed",
    "QueueConfig",
    "QueueError",
    "QueueMetrics",
    "QueueService",
    "QueueTopicError",
    "Reject",
    "SendFailed",
    "TrackerConfig",
    "backoff",
]


def __dir__() -> list[str]:
    """Return the public names, without the modules that they come from."""
    return __all__
