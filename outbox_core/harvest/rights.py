"""Which topic is meant when Kafka says that we may not write.

A transaction that fails for a missing right does not always say for which of its topics, and one of them is never the
records' own: the tracking topic, with the manifest. So the cluster is asked, always; nothing is held on suspicion.
"""

from __future__ import annotations

from outbox_core.errors import TrackingTopicError
from outbox_core.harvest.surroundings import DeadLetters


class Rights:
    """Tells where we may not write.

    Args:
        dead_letters: whom to ask.
        tracking_topic: where the manifests go.
        grant_write: advises to grant us WRITE on it.
    """

    def __init__(self, dead_letters: DeadLetters, tracking_topic: str, grant_write: str) -> None:
        self._ask = dead_letters.forbidden
        self._tracking_topic = tracking_topic
        self._grant_write = grant_write

    def missing_for(self, topics: set[str]) -> set[str]:
        """Those of the topics to which we may not write, as far as the cluster tells.

        Raises:
            TrackingTopicError: if the tracking topic is one that we may not write to: nothing can be published.
        """
        forbidden = self._ask(topics | {self._tracking_topic})
        if self._tracking_topic in forbidden:
            raise TrackingTopicError(
                f"cannot write to tracking topic {self._tracking_topic!r}, as exactly-once delivery does in every "
                f"transaction; {self._grant_write}"
            )
        return forbidden & topics
