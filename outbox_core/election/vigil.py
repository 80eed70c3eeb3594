"""Whether anybody leads the group, as one member sees it, and if not, why: for health checks and the log.

A member that works tells of no trouble, whoever leads. There is trouble once nobody's heartbeat has been read for three
sessions (the longest hand-over takes one), once Kafka has refused our own messages for as long as a lease lasts, or
while the group is led for another outbox than ours, which then is not published by anybody.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outbox_core.election.claims import Heartbeat, Signal
from outbox_core.election.connection import Connection, why_refused
from outbox_core.election.leadership import now
from outbox_core.errors import GroupRefused

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig
    from outbox_core.kafka import KafkaError, Producer

logger = logging.getLogger("outbox_core.election")

_SESSIONS_OF_SILENCE = 3


class Vigil:
    """What a member has heard, and what Kafka has refused. Written by one thread; `trouble` may be read by any.

    Args:
        config: The settings.
        connection: Knows whether Kafka answers.
    """

    def __init__(self, config: NeliConfig, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._lease = config.heartbeat_timeout.total_seconds()
        self._longest_silence = _SESSIONS_OF_SILENCE * config.session_timeout.total_seconds()
        self._heard_at = now()
        self._has_heard = False
        self._refusal = ""
        self._refused_since = 0.0
        self._has_warned = False
        self._stranger = ""

    @property
    def trouble(self) -> str | None:
        """What keeps the group from having a leader that works for us, or None."""
        at, group = now(), self._config.group_id
        silence, unanswered = at - self._heard_at, at - self._connection.answered_at
        if silence <= self._lease:
            return self._stranger or None
        reason = self._refusal_that_lasts(at)
        if silence <= self._longest_silence and not reason:
            return None
        if unanswered > self._lease:
            cause = f" ({complaint})" if (complaint := self._connection.complaint) else ""
            return f"Kafka has not answered for {unanswered:.0f} s{cause}"
        reason = reason or self._connection.complaint or f"no heartbeat on leader topic {self._config.topic!r}"
        return f"leader group {group!r} has had no leader for {silence:.0f} s: {reason}"

    def heard(self, signal: Signal | None) -> None:
        """Take note of a message of the leader topic.

        Raises:
            GroupRefused: if the first leader that is heard of leads for another outbox than ours.
        """
        ours = self._config.contest
        if not isinstance(signal, Heartbeat) or not ours.includes(signal.contest):
            return
        self._heard_at = now()
        stranger = "" if ours.agrees(signal.contest) else self._about(signal)
        if stranger and not self._has_heard:
            raise GroupRefused(stranger)
        if stranger and not self._stranger:
            logger.error("%s", stranger)
        self._has_heard = True
        self._stranger = stranger

    def accepted(self) -> None:
        """Take note that Kafka has taken a message of ours."""
        self._connection.well()
        if self._has_warned:
            logger.info("%s: leader topic %r takes messages again", self._config.name, self._config.topic)
        self._refusal = ""
        self._has_warned = False

    def refused(self, error: KafkaError) -> None:
        """Take note that a message of ours was not taken; say it once it has lasted."""
        if error.code() > 0:  # below, it is the client's own: no broker said it
            self._connection.answered()
        if not self._refusal:
            self._refused_since = now()
        self._refusal = why_refused(error, self._config)
        reason = self._refusal_that_lasts(now())
        if reason and not self._has_warned:
            self._has_warned = True
            logger.warning("%s cannot lead %s: %s; trying on", self._config.name, self._config.group_id, reason)

    def look(self, producer: Producer) -> None:
        """Ask Kafka now and then while nothing is heard, so that `trouble` names the right cause."""
        self._connection.look(producer, in_doubt=now() - self._heard_at > self._lease / 2)

    def ends_tenure(self) -> None:
        """Forget what was refused: another member writes from now on."""
        self._refusal = ""

    def _refusal_that_lasts(self, at: float) -> str:
        return self._refusal if self._refusal and at - self._refused_since > self._lease else ""

    def _about(self, signal: Signal) -> str:
        """What is wrong with a leader that leads for another outbox."""
        config = self._config
        return (
            f"leader group {config.group_id!r} is led by {signal.name} for {signal.contest}, and ours is "
            f"{config.contest}: one of the two would not be published. Set another leaderGroupID (leader_group_id) for "
            "one of them; two servers with databases of one name need that"
        )
