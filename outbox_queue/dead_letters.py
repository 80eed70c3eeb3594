"""Messages that were set aside: how they are written, listed, sent again and thrown away.

The dead letter topic is compacted and its records have a key of their own, `<queue>/<place of the first copy>`. So a
dead letter never expires, and sending it again or throwing it away is a tombstone for its key, written to its
partition in the same transaction as the new copy. Whoever reads the topic to its end knows what is left.

Every command that changes something uses one transactional.id: of two at work at a time, Kafka fences the first, and
no letter is sent again twice. What a fenced command had committed stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from outbox_core.kafka import KafkaException
from outbox_queue import headers as message_headers
from outbox_queue.clients import transactional_settings
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueError, QueueTopicError
from outbox_queue.headers import Header
from outbox_queue.topic_reader import TopicRecord, read_to_end
from outbox_queue.transaction import Transaction

_PATIENCE_SECONDS = 30.0
_BATCH = 500
_BATCH_BYTES = 4_000_000

_log = logging.getLogger(__name__)


class DeadLetter(NamedTuple):
    """A message that was set aside.

    Attributes:
        partition: in the dead letter topic.
        key: of its record.
        queue: id of its queue.
        id: place of its first copy, `partition-offset`.
        attempts: how many were made; 0 if it was never handed out.
        enqueued_at_ms: when its first copy was sent, if that is known.
        dead_at_ms: when it was set aside.
        reason: why.
        headers: the user's.
        payload: what was sent.
    """

    partition: int
    key: bytes
    queue: str
    id: str
    attempts: int
    enqueued_at_ms: int | None
    dead_at_ms: int | None
    reason: str
    headers: tuple[Header, ...]
    payload: bytes


def record(
    queue: bytes,
    payload: bytes | None,
    *,
    headers: Iterable[Header],
    attempts: int,
    enqueued_at_ms: int | None,
    origin: tuple[int, int],
    reason: str,
    dead_at_ms: int,
) -> tuple[bytes, bytes, list[Header]]:
    """Key, value and headers of a dead letter's record.

    Args:
        queue: id of its queue.
        payload: of the message; None, a stranger's tombstone, becomes empty, as it would remove the letter.
        headers: the user's.
        attempts: how many were made.
        enqueued_at_ms: when the first copy was sent, if that is known.
        origin: place of the first copy.
        reason: why it is set aside.
        dead_at_ms: now, since 1970.
    """
    described = message_headers.of_dead_letter(
        headers,
        attempts=attempts,
        enqueued_at_ms=enqueued_at_ms,
        origin=origin,
        reason=reason,
        dead_at_ms=dead_at_ms,
    )
    key = queue + b"/" + message_headers.place_text(origin).encode()
    return key, payload or b"", [*described, (message_headers.QUEUE, queue)]


class DeadLetters:
    """The dead letters of all queues of a pair of topics.

    Args:
        config: of the queues.
    """

    def __init__(self, config: QueueConfig) -> None:
        self._config = config

    def all(self, queue: str | None = None) -> list[DeadLetter]:
        """What is set aside, in the order of partitions and offsets; of one queue, or of all.

        Raises:
            QueueTopicError: if there is no dead letter topic.
            KafkaUnavailable: if the cluster does not answer.
        """
        left: dict[tuple[int, bytes], TopicRecord] = {}
        for letter in read_to_end(self._config, self._config.dead_letters):
            key = (letter.partition, letter.key or b"")
            left.pop(key, None)
            if letter.value is not None:
                left[key] = letter
        letters = [_letter(letter) for letter in left.values()]
        return [letter for letter in letters if queue is None or letter.queue == queue]

    def requeue(self, choose: Callable[[DeadLetter], bool]) -> list[DeadLetter]:
        """Send the chosen ones to their queues again, with all their attempts before them; return them.

        Raises:
            QueueError: if another command takes over meanwhile, or Kafka refuses; what was done before stays done.
            KafkaUnavailable: if the cluster does not answer.
        """
        return self._remove(choose, again=True)

    def discard(self, choose: Callable[[DeadLetter], bool]) -> list[DeadLetter]:
        """Throw the chosen ones away; return them.

        Raises:
            QueueError: if another command takes over meanwhile, or Kafka refuses; what was done before stays done.
            KafkaUnavailable: if the cluster does not answer.
        """
        return self._remove(choose, again=False)

    def _remove(self, choose: Callable[[DeadLetter], bool], *, again: bool) -> list[DeadLetter]:
        done: list[DeadLetter] = []
        is_done = False
        while not is_done:
            with self._transactions() as transaction:
                # Only now: what a command that is fenced by this one has committed is seen.
                left = [letter for letter in self.all() if choose(letter)]
                is_done = self._remove_some(transaction, left, done, again=again)
        return done

    def _remove_some(
        self, transaction: Transaction, letters: list[DeadLetter], done: list[DeadLetter], *, again: bool
    ) -> bool:
        """Remove letters; return False if a new producer has to go on, and to see first which are left."""
        for batch in _batches(letters):
            if transaction.must_replace:
                return False
            failure = transaction.run(lambda batch=batch: self._send(transaction, batch, again=again))  # type: ignore[misc]
            if failure is not None:
                raise QueueError(
                    f"dead letters of {self._config.dead_letters!r}: {failure.reason}; if no other command is at "
                    "work, run it again: what was done is not repeated"
                )
            done += batch
        return True

    def _send(self, transaction: Transaction, batch: list[DeadLetter], *, again: bool) -> None:
        for letter in batch:
            if again:
                origin = message_headers.place(letter.id.encode())
                copy = (
                    message_headers.of_copy(
                        letter.headers, attempt=1, enqueued_at_ms=letter.enqueued_at_ms, origin=origin
                    )
                    if origin is not None
                    else list(letter.headers)  # a stranger's, without a place: it begins anew
                )
                transaction.produce(self._config.message_topic, letter.payload, letter.queue.encode(), headers=copy)
            transaction.produce(self._config.dead_letters, None, letter.key, partition=letter.partition)

    @contextmanager
    def _transactions(self) -> Iterator[Transaction]:
        settings = transactional_settings(self._config, f"{self._config.dead_letters}-requeue")
        transaction = Transaction(settings)
        try:
            failure = transaction.start(_PATIENCE_SECONDS)
            if failure is not None:
                raise QueueError(f"cannot begin to change {self._config.dead_letters!r}: {failure.reason}")
            yield transaction
        except KafkaException as error:
            raise QueueTopicError(f"dead letters of {self._config.dead_letters!r}: {error.args[0].str()}") from None
        finally:
            transaction.discard()


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


def _letter(letter: TopicRecord) -> DeadLetter:
    travelled = message_headers.read(letter.headers)
    ours = dict(letter.headers)
    queue, _, place = (letter.key or b"").rpartition(b"/")
    return DeadLetter(
        partition=letter.partition,
        key=letter.key or b"",
        queue=(ours.get(message_headers.QUEUE) or queue).decode(errors="replace"),
        id=message_headers.place_text(travelled.origin) if travelled.origin else place.decode(errors="replace"),
        attempts=message_headers.number(ours.get(message_headers.ATTEMPT)) or 0,
        enqueued_at_ms=travelled.enqueued_at_ms,
        dead_at_ms=message_headers.number(ours.get(message_headers.DEAD_AT)),
        reason=message_headers.UNREADABLE if travelled.is_unreadable else travelled.reason,
        headers=travelled.headers,
        payload=letter.value or b"",
    )
