"""Rules of queues, each broken on purpose: a simulation that does not notice proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from outbox_queue.consuming import start_writers
from outbox_queue.consuming.acks import AckHandler
from outbox_queue.consuming.group_member import GroupMember
from outbox_queue.consuming.marker_writer import MarkerRecord
from outbox_queue.consuming.start_writers import NotStarted, PlainStartWriter, SecondsLeft, TransactionalStartWriter
from outbox_queue.duty import GroupDuty
from outbox_queue.protocol import transaction
from outbox_queue.redelivery import partition as partitions
from outbox_queue.redelivery.deadline_clock import DeadlineClock
from outbox_queue.redelivery.in_progress import InProgress
from outbox_queue.redelivery.partition import MarkerPartition
from outbox_queue.redelivery.redeliverer import Redeliverer
from outbox_queue.redelivery.tracked_partition import TrackedPartition
from tests.simulation import queue_simulation
from tests.simulation.queue_simulation import LINKS_ALONE

_original_attend = TrackedPartition.attend
_original_take = GroupMember.take
_original_write = PlainStartWriter.write
_original_fill = Redeliverer._fill
_original_redeliver = Redeliverer.redeliver
Double = tuple[object, str, Any]


def _attend_by_the_clock(self: TrackedPartition, now: float) -> bool:
    """Judge what seems to be expired, whatever has not been read yet."""
    markers = self.markers
    if markers.looks_expired(now) and not markers.has_expired:
        if not self._redeliverer.is_prepared and not self._prepare():
            return False
        time = markers.time(now) or 0.0
        markers._judgement = partitions._Judgement(time, list(reversed(markers._in_progress.expired(time))))
    return _original_attend(self, now)


def _send_unprepared_tick(self: TrackedPartition, now: float) -> bool:
    value, token = self.markers.send_tick(now, may_judge=True)
    self._ctx.ticks.produce(
        self._ctx.config.marker_topic,
        value,
        None,
        self.markers.number,
        on_delivery=lambda error, _: self.markers.tick_failed(token) if error is not None else None,
    )
    return True


def _prepare_and_redeliver(self: Redeliverer, entries: Any, give_up: Any) -> Any:
    if not self.is_prepared:
        self.prepare(transaction.never)
    return _original_redeliver(self, entries, give_up)


def _assign_as_it_was(self: GroupMember, consumer: Any, partitions: Any) -> None:
    """Believe that an assignment begins with nothing paused."""
    consumer.assign(partitions)
    self._duty.assigned((partition.partition for partition in partitions), consumer.memberid())
    self._is_paused = False


def _take_for_good(self: GroupMember, most: int) -> tuple[list[Any], dict[int, int]]:
    """Move past records before they are started."""
    records, offsets = _original_take(self, most)
    self._move_past_taken(offsets)
    return records, offsets


def _keep_alive_nothing(self: MarkerPartition, message_id: Any, *_: object) -> None:
    del self, message_id


def _commit_then_mark(
    self: PlainStartWriter, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft
) -> None:
    try:
        start_writers.commit(self._config, self._consumer, offsets)
    except start_writers.KafkaException as error:
        raise NotStarted(error.args[0].str(), error.args[0]) from None
    _original_write(self, markers, offsets, seconds_left)


def _mark_alone(
    self: TransactionalStartWriter,
    markers: Sequence[MarkerRecord],
    offsets: Mapping[int, int],
    seconds_left: SecondsLeft,
) -> None:
    """Commit the markers in a transaction, and the offsets before it."""
    try:
        start_writers.commit(self._config, self._consumer, offsets)
    except start_writers.KafkaException as error:
        raise NotStarted(error.args[0].str(), error.args[0]) from None
    producer, failure = self._ready(seconds_left)

    def fill() -> None:
        for marker in markers:
            producer.produce(self._config.marker_topic, marker.value, marker.key, marker.partition)

    failure = failure or transaction.run(producer, fill, lambda: seconds_left() <= 0)
    if failure is not None:
        self.close()
        raise NotStarted(failure.reason, failure.error)


class _Only:
    """A producer that takes the records of some topics alone."""

    def __init__(self, producer: Any, takes: Callable[[str], bool]) -> None:
        self._producer, self._takes = producer, takes

    def produce(self, topic: str, *record: Any, **more: Any) -> None:
        if self._takes(topic):
            self._producer.produce(topic, *record, **more)


def _fill_without_end(self: Redeliverer, producer: Any, batch: Any, *, stripped: bool) -> None:
    topic = self._config.marker_topic
    _original_fill(self, _Only(producer, lambda name: name != topic), batch, stripped=stripped)


def _fill_in_two(self: Redeliverer, producer: Any, batch: Any, *, stripped: bool) -> None:
    topic = self._config.marker_topic
    _original_fill(self, _Only(producer, lambda name: name != topic), batch, stripped=stripped)
    producer.commit()
    producer.begin()
    _original_fill(self, _Only(producer, lambda name: name == topic), batch, stripped=stripped)


def _take_all(self: MarkerPartition, most: int, most_bytes: int) -> Any:
    del most, most_bytes
    taken = list(self._judgement.expired)
    self._judgement.expired.clear()
    return taken


QUEUE_RULES: dict[str, tuple[Double, ...]] = {
    "a tracker judges behind a tick that it has read": ((TrackedPartition, "attend", _attend_by_the_clock),),
    "a tracker fences before its tick": (
        (TrackedPartition, "send_tick", _send_unprepared_tick),
        (Redeliverer, "redeliver", _prepare_and_redeliver),
    ),
    "a tracker commits the first unfinished offset": (
        (MarkerPartition, "offset_to_commit", lambda self: self.position),
    ),
    "a tracker heeds keep-alives": ((MarkerPartition, "_keep_alive", _keep_alive_nothing),),
    "a tracker heeds end markers": ((InProgress, "end", lambda *_: False),),
    "what ended since the tick is left out": ((MarkerPartition, "take_expired", _take_all),),
    "deadlines count from the reading of a marker": ((DeadlineClock, "latest", lambda _, appended, __: appended),),
    "a redelivery ends the old copy": ((Redeliverer, "_fill", _fill_without_end),),
    "a redelivery is one transaction": ((Redeliverer, "_fill", _fill_in_two),),
    "markers come before offsets": (
        (PlainStartWriter, "write", _commit_then_mark),
        (TransactionalStartWriter, "write", _mark_alone),
    ),
    "offsets wait for the markers' acknowledgement": ((start_writers, "_flush", lambda *_: None),),
    "what was not started is taken again": ((GroupMember, "take", _take_for_good),),
    "what was paused is resumed when it is assigned": ((GroupMember, "_assigned", _assign_as_it_was),),
    "a message in progress is kept alive": ((AckHandler, "_keep_alive", lambda *_: None),),
    "who cannot work leaves its group": ((GroupDuty, "act", lambda *_: None),),
}


_SITUATIONS: dict[str, dict[str, Any]] = {
    # A tracker is suspended while it fences, until another one has redelivered the same messages.
    "a tracker fences before its tick": {
        "faults": ("at a call",), "step_share": 0.2, "step_faults": ("suspend",), "trackers": 2,
        "is_transactional": False, "conducts": ("hang", "interrupt"),
    },
    # A consumer goes on, and finishes messages that have just expired.
    "what ended since the tick is left out": {"faults": ("suspend",)},
    # An idle partition gets another leader, whose clock is behind.
    "deadlines count from the reading of a marker": {"faults": ("clock", "move"), "pause": 1.0, "queues": 1},
    # Transactions are given up that start messages, and others follow.
    "what was not started is taken again": {"faults": ("cut",), "consumers": 1, "is_transactional": True},
    # One link is cut for minutes.
    "who cannot work leaves its group": LINKS_ALONE,
}  # fmt: skip
"""Changes of the plans of their runs, for rules that count in rare situations."""


@contextmanager
def queue_broken(name: str) -> Iterator[None]:
    """Break a rule for as long as the context lasts; '' breaks none."""
    with ExitStack() as patches:
        for double in QUEUE_RULES[name] if name else ():
            patches.enter_context(patch.object(*double))
        patches.enter_context(patch.object(queue_simulation, "SITUATION", _SITUATIONS.get(name, {})))
        yield
