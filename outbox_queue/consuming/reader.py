"""The thread that reads the message topic for a consumer.

For each batch, in this order:

1. read records, and skip those of other queues (`group_member`);
2. build a start marker for each of ours (`start_markers`);
3. write the markers, and commit the offsets (`start_writers`);
4. only then put the messages into the buffer.

If 2 or 3 fails, the same records are taken again, without those whose partitions were revoked meanwhile: a new owner
reads these. If it is not known whether 3 has failed, those are left out that the group has committed by then. If the
process dies after 3, the trackers know of every message that it had.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping

from outbox_core import election
from outbox_core.kafka.errors import MEMBER_HOPELESS, principal_of
from outbox_core.printable import plural
from outbox_queue.config import QueueConfig
from outbox_queue.consuming.acks import AckHandler
from outbox_queue.consuming.buffer import PrefetchBuffer
from outbox_queue.consuming.group_member import GroupMember
from outbox_queue.consuming.start_markers import Batch, StartMarkers
from outbox_queue.consuming.start_writers import (
    NotStarted,
    PlainStartWriter,
    SecondsLeft,
    StartWriter,
    TransactionalStartWriter,
    deadline,
)
from outbox_queue.duty import LEAVE_SECONDS, GroupDuty
from outbox_queue.errors import QueueError
from outbox_queue.metrics import QueueCounters
from outbox_queue.protocol.clients import group_of

_READ_AT_ONCE = 500
_WAIT_SECONDS = 0.1
_PAUSE_AFTER_FAILURE_SECONDS = 0.5
_START = "start messages"
_FEW = 5

_log = logging.getLogger(__name__)


class _ChangeLog:
    """A log of a queue's warnings, each of the last few once: steps that fail are tried again and again, by turns."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._told: deque[str] = deque(maxlen=_FEW)

    def warn(self, text: str) -> None:
        if text not in self._told:
            self._told.append(text)
            _log.warning("queue %r: %s", self._queue, text)

    def reset(self) -> None:
        self._told.clear()


class QueueReader:
    """The thread that reads one queue's messages into a buffer."""

    def __init__(
        self,
        config: QueueConfig,
        start_markers: StartMarkers,
        buffer: PrefetchBuffer,
        acks: AckHandler,
        counters: QueueCounters,
    ) -> None:
        queue = start_markers.queue
        self._config = config
        self._queue = queue
        self._start_markers = start_markers
        self._buffer = buffer
        self._acks = acks
        self._changes = _ChangeLog(queue)
        self._duty = GroupDuty(
            f"queue {queue!r}: this consumer", group_of(queue), config.message_topic, config, counters.consumer_left
        )
        self._member = GroupMember(config, queue, counters, self._changes.warn, self._commit, duty=self._duty)
        consumer = self._member.consumer
        self._writer: StartWriter = (
            TransactionalStartWriter(config, queue, consumer)
            if config.transactional
            else PlainStartWriter(config, consumer)
        )
        self._stopping = threading.Event()
        self._stop_deadline: SecondsLeft | None = None
        self._thread = threading.Thread(target=self._run, name=f"outbox-queue-{queue}", daemon=True)

    def start(self) -> None:
        """Join the group, and begin to read."""
        self._duty.start()
        self._member.subscribe()
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """The reason why it has left the queue's group, None if it has not."""
        return self._duty.trouble

    def stop(self, timeout_seconds: float) -> None:
        """Begin to stop; abandon a batch under way after so many seconds."""
        if self._stop_deadline is None:
            self._stop_deadline = deadline(timeout_seconds)
        self._stopping.set()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step()
            self._member.commit_skipped()
        except Exception as error:
            _log.exception("queue %r: reading has ended", self._queue)
            self._buffer.fail(error)
        finally:
            self._duty.close()
            self._member.close()  # which may commit once more
            self._writer.close()
            del self._writer  # it refers to the client, whose threads end with the last reference

    def _step(self) -> None:
        self._duty.act(self._member.unsubscribe, self._member.subscribe)
        capacity = self._buffer.capacity(_WAIT_SECONDS)
        if capacity:
            if not self._member.has_fetched:
                self._member.fetch(max(capacity, _READ_AT_ONCE))
            self._start(capacity)
        if not self._stopping.is_set():
            self._member.poll_while_full()
        self._member.commit_if_due()
        self._member.report_lag_if_due()

    def _start(self, capacity: int) -> None:
        records, offsets = self._member.take(capacity)
        if not records:
            self._member.skip(offsets)
            return
        self._duty.tried(_START)
        try:
            if self._writer.is_in_doubt:
                self._writer.settle(self._seconds_left())
                self._member.drop_committed()  # trackers know them
                self._writer.is_in_doubt = False
                return
            batch = self._start_markers.build(records)
            self._writer.write(batch.markers, self._member.offsets.skipped | offsets, self._seconds_left())
        except NotStarted as error:
            why = str(error)
            if error.cause is not None and error.cause.code() in MEMBER_HOPELESS:
                why += f" (as {principal_of(self._config.kafka)})"
                if not self._duty.has_done(_START):
                    raise QueueError(f"messages of queue {self._queue!r} cannot be started: {why}") from None
            self._changes.warn(f"messages are not started yet: {why}")
            if not self._stopping.wait(_PAUSE_AFTER_FAILURE_SECONDS):
                self._member.poll_paused()  # a start marker after the end marker of a new owner would revive a message
            return
        self._duty.succeeded(_START)
        self._member.committed(offsets)
        self._put(batch, there_are_more=self._member.has_fetched or len(records) == capacity)
        self._changes.reset()

    def _commit(self, offsets: Mapping[int, int]) -> None:
        """Commit offsets as those of started messages: a plain commit that comes late would take these back."""
        self._writer.write((), offsets, self._seconds_left())

    def _put(self, batch: Batch, *, there_are_more: bool) -> None:
        self._acks.count_started(len(batch.due), parked=batch.parked)
        is_late = any(delivery.deadline <= election.now() for delivery in batch.due[:1])  # all have the same
        if is_late:
            text = "queue %r: starting %s took longer than redelivery_timeout; given back"
            _log.warning(text, self._queue, plural(len(batch.due), "message"))
        if is_late or not self._buffer.put(batch.due, there_are_more=there_are_more):
            self._acks.return_unused(batch.due)

    def _seconds_left(self) -> SecondsLeft:
        """Start the countdown of a batch: the time of its delivery, and less once the consumer closes or must leave."""
        whole, short = deadline(self._config.delivery_timeout.total_seconds() + 1), deadline(LEAVE_SECONDS)

        def seconds_left() -> float:
            left = short() if self._duty.is_unable else whole()
            stop = self._stop_deadline
            return left if stop is None else min(left, stop())

        return seconds_left
