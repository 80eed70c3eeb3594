"""Dead letters in their topic: listed, sent again or discarded.

The topic is compacted, and a letter's key is `<queue>/<place of the first copy>`, so it never expires. A tombstone for
its key, in its partition, removes it; if it is sent again, in the same transaction as the new copy.

A consumer that dies between a letter and the message's end marker leaves the message to a tracker, which may write a
second letter, to another partition. Both are one here: it is listed, sent and deleted once.

All commands that change something use one transactional.id: of two at work, Kafka fences the first, whose commits stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from outbox_core.kafka.clients import KafkaException
from outbox_core.kafka.transactions import TransactionalProducer
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueError, QueueTopicError
from outbox_queue.operations.topic_reader import TopicRecord, read_to_end
from outbox_queue.protocol import headers as message_headers
from outbox_queue.protocol import transaction
from outbox_queue.protocol.clients import transactional_settings
from outbox_queue.protocol.headers import Header

_TIMEOUT_SECONDS = 30.0
_BATCH = 500
_BATCH_BYTES = 4_000_000


class DeadLetter(NamedTuple):
    """A message in the dead letter topic."""

    partitions: tuple[int, ...]  # of its records
    key: bytes  # of its record
    queue: str
    id: str  # place of its first copy, `partition-offset`
    attempts: int  # number of attempts made; 0 if it was never handed out
    enqueued_at_ms: int | None  # when its first copy was sent, if that is known
    dead_at_ms: int | None
    reason: str
    headers: tuple[Header, ...]  # the user's
    payload: bytes


class DeadLetters:
    """The dead letters of all queues of a pair of topics."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config

    def all(self, queue: str | None = None) -> list[DeadLetter]:
        """List the dead letters of one queue, or of all, by partition and offset."""
        left: dict[tuple[int, bytes], TopicRecord] = {}
        for record in read_to_end(self._config, self._config.dead_letters):
            key = (record.partition, record.key or b"")
            left.pop(key, None)
            if record.value is not None:
                left[key] = record
        letters: dict[object, DeadLetter] = {}
        for letter in map(_letter, left.values()):
            # The places of a topic that was made again come again: only equal messages are one.
            same = (letter.key, letter.enqueued_at_ms, letter.payload)
            letters[same] = letter if same not in letters else _merged(letters[same], letter)
        return [letter for letter in letters.values() if queue is None or letter.queue == queue]

    def requeue(self, choose: Callable[[DeadLetter], bool]) -> list[DeadLetter]:
        """Send the chosen letters to their queues again, with all their attempts before them; return them.

        If another command takes over meanwhile, or Kafka refuses, it raises `QueueError`; commits before that stay.
        """
        return self._remove(choose, self._send_again)

    def discard(self, choose: Callable[[DeadLetter], bool]) -> list[DeadLetter]:
        """Delete the chosen letters; return them. Errors are those of `requeue`."""
        return self._remove(choose, self._delete)

    def _remove(
        self,
        choose: Callable[[DeadLetter], bool],
        produce: Callable[[TransactionalProducer, list[DeadLetter]], None],
    ) -> list[DeadLetter]:
        done: list[DeadLetter] = []
        while True:
            with self._started_producer() as producer:
                # Read only now, to see the commits of a command that this one has fenced.
                for batch in _batches([letter for letter in self.all() if choose(letter)]):
                    if producer.must_replace:
                        break  # a new producer goes on, and reads again which are left
                    failure = transaction.run(producer, partial(produce, producer, batch))
                    if failure is not None:
                        raise QueueError(
                            f"dead letters of {self._config.dead_letters!r}: {failure.reason}; if no other command is "
                            "at work, run it again: finished changes are not repeated"
                        )
                    done += batch
                else:
                    return done

    def _send_again(self, producer: TransactionalProducer, batch: list[DeadLetter]) -> None:
        for letter in batch:
            origin = message_headers.place(letter.id.encode())
            headers = list(letter.headers)
            if origin is not None:  # else another program wrote it, without a place: it begins anew
                headers = message_headers.of_copy(
                    headers, attempt=1, enqueued_at_ms=letter.enqueued_at_ms, origin=origin
                )
            producer.produce(self._config.message_topic, letter.payload, letter.queue.encode(), headers=headers)
        self._delete(producer, batch)

    def _delete(self, producer: TransactionalProducer, batch: list[DeadLetter]) -> None:
        for letter in batch:
            for partition in letter.partitions:
                producer.produce(self._config.dead_letters, None, letter.key, partition=partition)

    @contextmanager
    def _started_producer(self) -> Iterator[TransactionalProducer]:
        topic = self._config.dead_letters
        producer = transaction.transactional_producer(transactional_settings(self._config, f"{topic}-requeue"))
        try:
            failure = transaction.start(producer, _TIMEOUT_SECONDS)
            if failure is not None:
                raise QueueError(f"cannot begin to change {topic!r}: {failure.reason}")
            yield producer
        except KafkaException as error:
            raise QueueTopicError(f"dead letters of {topic!r}: {error.args[0].str()}") from None
        finally:
            producer.discard()


def _batches(letters: list[DeadLetter]) -> Iterator[list[DeadLetter]]:
    batch: list[DeadLetter] = []
    size = 0
    for letter in letters:
        batch.append(letter)
        size += len(letter.payload)
        if len(batch) >= _BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _letter(record: TopicRecord) -> DeadLetter:
    travelled = message_headers.read(record.headers)
    ours = dict(record.headers)
    queue, _, place = (record.key or b"").rpartition(b"/")
    return DeadLetter(
        partitions=(record.partition,),
        key=record.key or b"",
        queue=message_headers.queue_name(ours.get(message_headers.QUEUE) or queue),
        id=message_headers.place_text(travelled.origin) if travelled.origin else place.decode(errors="replace"),
        attempts=message_headers.number(ours.get(message_headers.ATTEMPT)) or 0,
        enqueued_at_ms=travelled.enqueued_at_ms,
        dead_at_ms=message_headers.number(ours.get(message_headers.DEAD_AT)),
        reason=message_headers.UNREADABLE if travelled.is_unreadable else travelled.reason,
        headers=travelled.headers,
        payload=record.value or b"",
    )


def _merged(one: DeadLetter, other: DeadLetter) -> DeadLetter:
    newest = max(one, other, key=lambda letter: letter.dead_at_ms or 0)
    return newest._replace(partitions=one.partitions + other.partitions)
