"""Topics that we may not write to, as the cluster confirms: no topic is held on suspicion.

A transaction that fails for a missing right does not always name the topic, which may be the tracking topic.
"""

from __future__ import annotations

from outbox_core.errors import TrackingTopicError
from outbox_core.harvest.context import HarvestContext


class DeniedTopics:
    """Questions to the cluster about our rights."""

    def __init__(self, ctx: HarvestContext, tracking_topic: str) -> None:
        self._ctx = ctx
        self._tracking_topic = tracking_topic

    def among(self, topics: set[str]) -> set[str]:
        """Return topics that we may not write to; raise TrackingTopicError if the tracking topic is among them."""
        forbidden = self._ctx.dead_letters.forbidden(topics | {self._tracking_topic})
        if self._tracking_topic in forbidden:
            raise TrackingTopicError(
                f"cannot write to tracking topic {self._tracking_topic!r}, as exactly-once delivery does in every "
                f"transaction; {self._ctx.grant_write}"
            )
        return forbidden & topics
