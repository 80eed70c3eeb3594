"""The health of the group as one member sees it, for probes and the log: the reason why it has no leader.

A working member reports no trouble. There is trouble without a leader's heartbeat for three sessions (the longest
hand-over takes one), once Kafka has refused our messages for as long as a lease lasts, or while the leader works for
another outbox, and no process publishes ours.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outbox_core.election.connection_log import ConnectionLog, why_refused
from outbox_core.election.lease import now
from outbox_core.election.messages import Heartbeat, Signal
from outbox_core.errors import GroupRefused
from outbox_core.kafka.errors import NO_SUCH_PARTITION

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig
    from outbox_core.kafka.clients import KafkaError, Producer

logger = logging.getLogger("outbox_core.election")

_SESSIONS_OF_SILENCE = 3


class GroupHealth:
    """The signs of life of a leader, and Kafka's refusals. Written by one thread; `trouble` may be read by any."""

    def __init__(self, config: NeliConfig, connection: ConnectionLog) -> None:
        self._config = config
        self._connection = connection
        self._lease = config.heartbeat_timeout.total_seconds()
        self._patience = _SESSIONS_OF_SILENCE * config.session_timeout.total_seconds()
        self.heard_at = now()  # the last time a leader's heartbeat was read; at first that of the start
        self.has_heard = False  # a leader: one for another outbox ends nothing any more
        self._rejoin_at = 0.0
        self._refusal = ""
        self._refused_since = 0.0
        self._has_warned = False
        self._stranger = ""

    @property
    def trouble(self) -> str | None:
        """The reason why the group has no leader that works for us, or None."""
        at, group = now(), self._config.group_id
        silence, unanswered = at - self.heard_at, at - self._connection.answered_at
        if silence <= self._lease:
            return self._stranger or None
        reason = self._lasting_refusal(at)
        if silence <= self._patience and not reason:
            return None
        last_error = self._connection.last_error
        if unanswered > self._lease:
            return f"Kafka has not answered for {unanswered:.0f} s" + (f" ({last_error})" if last_error else "")
        reason = last_error or reason or f"no heartbeat on leader topic {self._config.topic!r}"
        return f"leader group {group!r} has had no leader for {silence:.0f} s: {reason}"

    @property
    def silent_seconds(self) -> float:
        """Seconds since Kafka last did what this member asked of it, or brought a leader's heartbeat."""
        return max(0.0, now() - max(self.heard_at, self._connection.answered_at))

    @property
    def last_error(self) -> str:
        """The last complaint of Kafka or its client that still stands, '' for none."""
        return self._refusal or self._connection.last_error

    def joined(self) -> None:
        """Note that the group was joined just now."""
        self._rejoin_at = now() + self._patience

    def may_rejoin(self) -> bool:
        """Tell, ever more rarely, that no leader was heard for so long that the group may need to be joined anew."""
        at, due = now(), max(self.heard_at + self._patience, self._rejoin_at)
        if at >= due:
            self._rejoin_at = 2 * at - self.heard_at
        return at >= due

    def on_signal(self, signal: Signal | None) -> None:
        """Note a message of the leader topic.

        Raises GroupRefused if the first leader that this member hears of leads for another outbox.
        """
        config, ours = self._config, self._config.contest
        if not isinstance(signal, Heartbeat) or not ours.includes(signal.contest):
            return
        self.heard_at = now()
        stranger = ""
        if not ours.agrees(signal.contest):
            stranger = (
                f"leader group {config.group_id!r} is led by {signal.name} for {signal.contest}, and ours is "
                f"{ours}: one of the two would not be published. Two servers with databases of one name need a "
                "leaderGroupID (leader_group_id) each; after pg_upgrade or a move restart the leader, too"
            )
            if not self.has_heard:
                raise GroupRefused(stranger)
            if not self._stranger:
                logger.error("%s", stranger)
        self.has_heard = True
        self._stranger = stranger

    def on_accepted(self) -> None:
        """Note that Kafka has taken a message of ours."""
        self._connection.on_ok()
        if self._has_warned:
            logger.info("%s: leader topic %r takes messages again", self._config.name, self._config.topic)
        self._refusal = ""
        self._has_warned = False

    def on_refused(self, error: KafkaError) -> None:
        """Note that Kafka has not taken a message of ours, and log a lasting refusal once."""
        if error.code() > 0:  # below, it is the client's own: no broker said it
            self._connection.on_answer()
        if error.code() in NO_SUCH_PARTITION:
            self._connection.on_missing_topic()
        if not self._refusal:
            self._refused_since = now()
        self._refusal = why_refused(error, self._config)
        reason = self._lasting_refusal(now())
        if reason and not self._has_warned:
            self._has_warned = True
            logger.warning("%s cannot lead %s: %s; trying on", self._config.name, self._config.group_id, reason)

    def probe(self, producer: Producer) -> None:
        """Ask Kafka now and then while no leader is heard, so that `trouble` names the right cause."""
        self._connection.probe(producer, in_doubt=now() - self.heard_at > self._lease / 2)

    def forget_refusal(self) -> None:
        """Forget a refusal: another member writes from now on."""
        self._refusal = ""

    def _lasting_refusal(self, at: float) -> str:
        return self._refusal if self._refusal and at - self._refused_since > self._lease else ""
