"""A relay that leads and cannot publish hands leadership over, by the rule of `outbox_core.kafka.duty`.

Its work is one: to publish rows, or to find none. A batch that fails was tried from its beginning on. One that is still
at work counts as tried only after the time that a batch takes by itself: nothing of it is known before its end.

The driver's thread may hang in a statement, so a thread of its own looks. It asks who else is in the group of
harvesters and relays, and has the elector step down if there is anybody, or Kafka does not say. The probe that lets it
come back is the driver's: it reads the table over a new connection, and asks each broker itself. Tasks on other
machines may fare worse; then the relay is a standby soon, and the work elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from outbox_core.config import redact
from outbox_core.errors import KafkaUnavailable, OutboxError
from outbox_core.kafka.admin import Inquiry
from outbox_core.kafka.clients import KafkaConfig
from outbox_core.kafka.duty import Duty
from outbox_core.kafka.reach import unreachable_brokers
from outbox_spark.relay.plan import SLICE_SECONDS
from outbox_spark.relay.shard_store import ShardStore

_log = logging.getLogger(__name__)

_PUBLISH: Final = "publish rows"
_LOOK_SECONDS = 1.0
_MEMBERS_SECONDS = 8.0
_BROKERS_SECONDS = 5.0

StepDown = Callable[[str, Callable[[], bool]], None]


class RelayDuty:
    """The watch over a relay's batches. The driver's thread tells it of them; a thread of its own looks.

    Args:
        kafka: Settings of any client.
        group: The group of the outbox's harvesters and relays.
        store: Makes a store, to see whether the table can be read.
        step_down: Has the elector step down, see `outbox_core.election.Neli`.
    """

    def __init__(self, kafka: KafkaConfig, group: str, store: Callable[[], ShardStore], step_down: StepDown) -> None:
        self._kafka = kafka
        self._group = group
        self._store = store
        self._step_down = step_down
        self._duty = Duty()
        self._lock = threading.Lock()  # held for moments
        self._began_at: float | None = None  # the try that is under way
        self._failure = ""
        self._has_asked_to_leave = False
        self._is_alone = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-relay-duty", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more. A question under way ends by itself."""
        self._closing.set()

    # -- the driver's thread

    def leads(self, is_leader: bool) -> None:
        """Take in that leadership begins or ends."""
        with self._lock:
            self._began_at, self._failure = None, ""
            self._has_asked_to_leave = self._is_alone = False
            if is_leader:
                self._duty.began(time.monotonic())
            else:
                self._duty.ended()

    def tries(self) -> None:
        """Take in that a try to publish, or to find that there is nothing to publish, begins."""
        self._began_at = time.monotonic()

    def succeeded(self) -> None:
        """Take in that rows were published, or that none could be."""
        with self._lock:
            self._duty.succeeded(_PUBLISH)
            self._began_at, self._failure, self._is_alone = None, "", False

    def failed(self, failure: str) -> None:
        """Take in that the try has failed, with the reason."""
        with self._lock:
            began_at, self._began_at = self._began_at, None
            self._duty.tried(_PUBLISH, time.monotonic() if began_at is None else began_at)
            self._failure = failure

    # -- a thread of its own

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # nobody else watches
                _log.exception("the watch over the relay's work failed; it goes on")

    def look(self) -> None:
        """Look at what is owed, and have the elector step down if another process may do it."""
        with self._lock:
            now = time.monotonic()
            if self._began_at is not None and now - self._began_at > SLICE_SECONDS:
                self._duty.tried(_PUBLISH, self._began_at + SLICE_SECONDS)
            if self._has_asked_to_leave or not self._duty.should_ask(now):
                return
        members = self._members()
        with self._lock:
            overdue = self._duty.overdue(time.monotonic())
            if not overdue:
                return
            why = self._failure or "its tasks or the database do not answer"
            reason = redact(" ".join(f"it could not {_PUBLISH} for {overdue[_PUBLISH]:.0f} s: {why}".split()))
            if not self._duty.should_leave(members, time.monotonic()):
                if not self._is_alone:
                    _log.warning("%s; no other process is in group %s, so this one tries on", reason, self._group)
                self._is_alone = True
                return
            self._has_asked_to_leave = True
        self._step_down(reason, self.is_able)

    def _members(self) -> int | None:
        try:
            with Inquiry(self._kafka, _MEMBERS_SECONDS) as inquiry:
                return inquiry.members(self._group)
        except KafkaUnavailable:
            return None

    def is_able(self) -> bool:
        """Tell whether the table can be read over a new connection, and every broker answers."""
        try:
            with closing(self._store()) as store:
                store.is_empty()
            return not unreachable_brokers(self._kafka, _BROKERS_SECONDS)
        except OutboxError:
            return False
