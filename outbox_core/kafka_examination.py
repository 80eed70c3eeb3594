"""What `outbox doctor` and `outbox status` ask a Kafka cluster. Nothing is created, joined or written."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, NamedTuple

from outbox_core.examination import Finding, fine, problem, warning
from outbox_core.kafka import Inquiry, KafkaConfig, KafkaError, KafkaException

_ASSIGNOR = "cooperative-sticky"
_TIMEOUT_SECONDS = 20.0


class Contender(NamedTuple):
    """A harvester in the leader group.

    Attributes:
        client_id: its `client.id`, which is the harvester's name unless set otherwise.
        host: where it connects from.
        leads: whether it owns the leader topic's first partition. It may have been dead for as long as a session lasts.
    """

    client_id: str
    host: str
    leads: bool


class KafkaExamination:
    """Looks at what a harvester needs in Kafka.

    Args:
        config: librdkafka settings.

    Raises:
        KafkaUnavailable: if the cluster does not answer.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._inquiry = Inquiry(config, _TIMEOUT_SECONDS)
        self._inquiry.metadata()

    def cluster(self) -> Finding:
        """The brokers."""
        count = len(self._inquiry.metadata().brokers)
        return fine("cluster", f"answers, {count} broker{'' if count == 1 else 's'}")

    def leader_topic(self, topic: str) -> Finding:
        """The topic of the election: one partition, or leadership moves whenever a harvester joins; not compacted."""
        partitions = self._inquiry.partitions(topic)
        if partitions == 0:
            return fine("leader topic", f"{topic} is not there yet; the first harvester makes it")
        if partitions > 1:
            return warning(
                "leader topic",
                f"{topic} has {partitions} partitions: leadership may move whenever a harvester joins",
                "name a fresh leader_topic",
            )
        with suppress(KafkaException, FutureTimeoutError):  # who may not read the settings is not told of them
            policy = self._inquiry.topic_settings(topic)["cleanup.policy"]
            if "compact" in policy:
                return problem(
                    "leader topic",
                    f"{topic} has cleanup.policy={policy}, so it refuses the leader's messages, which have no key",
                    "set it to delete, or name another leader_topic",
                )
        return fine("leader topic", topic)

    def tracking_topic(self, topic: str, *, needed: bool) -> Finding:
        """The topic of exactly-once delivery's manifests."""
        partitions = self._inquiry.partitions(topic)
        if needed and not self._inquiry.can_create():
            return problem("tracking topic", "this cluster is a mock without transactions", "use a real broker")
        if partitions == 0:
            return fine(
                "tracking topic", f"{topic} is not there" + ("; the first harvester makes it" if needed else "")
            )
        policy = self._inquiry.topic_setting(topic, "cleanup.policy")
        if partitions > 1 or policy != "compact":
            return problem(
                "tracking topic",
                f"{topic} has {partitions} partition(s) and cleanup.policy={policy}, expected 1 and compact",
                "name a fresh tracking_topic",
            )
        return fine("tracking topic", topic)

    def dead_letter_topic(self, topic: str) -> Finding:
        """The topic that bad records go to."""
        if self._inquiry.partitions(topic) == 0:
            return fine("dead-letter topic", f"{topic} is not there yet; the harvester makes it")
        return fine("dead-letter topic", topic)

    def topics(self, names: Collection[str]) -> list[Finding]:
        """The topics that records wait for."""
        known = self._inquiry.metadata().topics
        missing = [name for name in names if name not in known]
        found = [
            warning(
                "topic",
                f"records wait for {name}, which does not exist or may not be seen",
                "create it, or grant DESCRIBE and WRITE on it; some brokers create it when it is first written to",
            )
            for name in missing
        ]
        return found or [fine("topics", f"all {len(names)} that records wait for are there")]

    def contenders(self, group: str) -> list[Contender]:
        """The harvesters that stand for election now, leader first."""
        members = self._describe(group).members
        found = [
            Contender(
                member.client_id,
                member.host.lstrip("/"),
                any(owned.partition == 0 for owned in member.assignment.topic_partitions),
            )
            for member in members
        ]
        return sorted(found, key=lambda contender: (not contender.leads, contender.client_id))

    def leader_group(self, group: str) -> Finding:
        """Who stands for election, and whether we could join them."""
        assignor = self._describe(group).partition_assignor
        if assignor not in {"", _ASSIGNOR}:
            return problem(
                "leader group",
                f"the members of {group} share their partitions by {assignor!r}, harvesters by {_ASSIGNOR!r}",
                "name another leader_group_id: this one belongs to other programs",
            )
        contenders = self.contenders(group)
        if not contenders:
            return warning("leader group", f"no harvester is in {group}", "start one: `outbox harvest`")
        leaders = [contender.client_id for contender in contenders if contender.leads]
        who = f"led by {leaders[0]}" if leaders else "with no leader at this moment"
        return fine("leader group", f"{len(contenders)} in {group}, {who}")

    def _describe(self, group: str) -> Any:
        answer = self._inquiry.admin.describe_consumer_groups([group], request_timeout=self._inquiry.remaining)[group]
        try:
            return answer.result(self._inquiry.remaining)
        except FutureTimeoutError:
            raise self._inquiry.unavailable("no answer about the leader group") from None
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            raise self._inquiry.unavailable(f"the leader group {group!r} cannot be described: {cause.str()}") from None
