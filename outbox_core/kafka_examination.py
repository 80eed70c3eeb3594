"""What `outbox doctor` and `outbox status` ask a Kafka cluster. Nothing is created, joined or written.

Rights are tried as far as they can be without effect: whatever the harvester will need after its next start should be
found missing now.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, NamedTuple, Self

from outbox_core.errors import KafkaUnavailable
from outbox_core.examination import Finding, Verdict, fine, problem, warning
from outbox_core.kafka import (
    Inquiry,
    KafkaConfig,
    KafkaError,
    KafkaException,
    TopicHidden,
    TopicLook,
    TransactionsRefused,
    check_transactional_id,
    grant,
    principal_of,
)

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
    """Looks at what a harvester needs in Kafka. Close it, or use it as a context manager.

    Args:
        config: librdkafka settings.

    Raises:
        KafkaUnavailable: if the cluster does not answer.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._known_settings: dict[str, dict[str, str]] = {}
        self._inquiry = Inquiry(config, _TIMEOUT_SECONDS)
        try:
            self._inquiry.metadata()
            self._is_real = self._inquiry.can_create()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the client."""
        self._inquiry.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cluster(self) -> Finding:
        """The brokers."""
        count = len(self._inquiry.metadata().brokers)
        return fine("cluster", f"answers, {count} broker{'' if count == 1 else 's'}")

    def leader_topic(self, topic: str) -> list[Finding]:
        """The topic of the election: one partition, or leadership moves whenever a harvester joins."""
        subject = "leader topic"
        found = self._look(subject, topic)
        if isinstance(found, Finding):
            return [found]
        wrong = [*self._rights(subject, topic, found, {"READ", "WRITE"}), *self._sizes(subject, topic, found, 4096)]
        policy = self._settings(topic).get("cleanup.policy", "")
        if "compact" in policy:
            wrong.append(
                problem(
                    subject,
                    f"{topic} has cleanup.policy={policy}, so it refuses the leader's messages, which have no key",
                    f"kafka-configs.sh --alter --topic {topic} --add-config cleanup.policy=delete",
                )
            )
        if found.partitions > 1:
            wrong.append(
                warning(
                    subject,
                    f"{topic} has {found.partitions} partitions: leadership may move whenever a harvester joins",
                    "name a fresh leader_topic",
                )
            )
        return wrong or [fine(subject, topic)]

    def tracking_topic(self, topic: str, *, needed: bool, manifest_bytes: int) -> list[Finding]:
        """The topic of exactly-once delivery's manifests.

        Args:
            topic: its name.
            needed: whether delivery is exactly once; otherwise it is only read and written to if it exists.
            manifest_bytes: how large a manifest gets.
        """
        subject = "tracking topic"
        if needed and not self._is_real:
            return [problem(subject, "this cluster is a mock without transactions", "use a real broker")]
        found = self._look(subject, topic)
        if isinstance(found, Finding):
            return [found]
        policy = self._settings(topic).get("cleanup.policy", f"unknown: {grant('DESCRIBE_CONFIGS', self._config)}")
        wrong = [
            *self._rights(subject, topic, found, {"READ", "WRITE", "DESCRIBE_CONFIGS"}),
            *self._sizes(subject, topic, found, manifest_bytes),
        ]
        if found.partitions > 1 or policy != "compact":
            wrong.append(
                problem(
                    subject,
                    f"{topic} has {found.partitions} partition(s) and cleanup.policy={policy}, expected 1 and compact",
                    "name a fresh tracking_topic",
                )
            )
        return wrong or [fine(subject, topic)]

    def transactional_id(self, transactional_id: str, tracking_topic: str, *, needed: bool) -> list[Finding]:
        """Whether transactions may be begun with it, as the next start will have to, if there ever were any."""
        if not self._is_real or not (needed or self._inquiry.look_at(tracking_topic)):
            return []
        try:
            check_transactional_id(self._config, transactional_id, timeout_seconds=self._inquiry.remaining)
        except TransactionsRefused as error:
            return [
                problem(
                    "transactional.id",
                    f"{transactional_id} may not be used: {error}",
                    grant("WRITE and DESCRIBE", self._config, f"the transactional.id {transactional_id}"),
                )
            ]
        return [fine("transactional.id", f"{transactional_id} may be used")]

    def relay_topic(self, topic: str) -> list[Finding]:
        """The manifests of a relay on Spark: every leader settles them first; nothing to say if there never was one."""
        subject = "relay's topic"
        found = self._look(subject, topic)
        if isinstance(found, Finding):
            return [found] if found.verdict is Verdict.PROBLEM else []
        return self._rights(subject, topic, found, {"READ", "WRITE"}) or [fine(subject, topic)]

    def dead_letter_topic(self, topic: str) -> list[Finding]:
        """The topic that bad records go to."""
        subject = "dead-letter topic"
        found = self._look(subject, topic)
        if isinstance(found, Finding):
            return [found]
        wrong = [*self._rights(subject, topic, found, {"WRITE"}), *self._sizes(subject, topic, found, 0)]
        return wrong or [fine(subject, topic)]

    def topics(self, names: Collection[str]) -> list[Finding]:
        """The topics that records wait for."""
        known = self._inquiry.metadata().topics
        found = []
        for name in names:
            if name not in known:
                found.append(
                    warning(
                        "topic",
                        f"records wait for {name}, which does not exist or may not be seen",
                        f"create it, or {grant('DESCRIBE and WRITE', self._config)}; some brokers create it when it "
                        "is first written to",
                    )
                )
                continue
            look = self._look("topic", name)
            if isinstance(look, TopicLook):
                wrong = [*self._rights("topic", name, look, {"WRITE"}), *self._sizes("topic", name, look, 0)]
                found += [warning("topic", f"records wait for {one.detail}", one.remedy) for one in wrong]
        return found or [fine("topics", f"all {len(names)} that records wait for are there")]

    def writers(self, topics: Collection[str]) -> Finding:
        """Who else may write to the topics through which harvesters are run, as far as ACLs can be seen.

        A message there deposes the leader, or has rows deleted that were never published.
        """
        subject = "ACLs"
        own = principal_of(self._config)
        others = []
        for topic in topics:
            writers = self._inquiry.writers(topic) if self._is_real else None
            if writers is None:
                return fine(subject, "cannot be seen: this needs DESCRIBE on the cluster, and an authorizer there")
            if writers - {own} and (own in writers or len(writers) > 1):
                others.append(f"{', '.join(sorted(writers - {own}))} may write to {topic}")
        if others:
            return warning(
                subject,
                "; ".join(others),
                "let nobody but the harvester write to *.neli, *.manifests and *.relay-manifests",
            )
        return fine(subject, "no others may write to the topics of the election and of manifests")

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
        subject = "leader group"
        try:
            described = self._describe(group)
        except KafkaUnavailable as error:
            return problem(
                subject, str(error), grant("READ, which lets it be described too,", self._config, f"the group {group}")
            )
        if described.partition_assignor not in {"", _ASSIGNOR}:
            return problem(
                subject,
                f"the members of {group} share their partitions by {described.partition_assignor!r}, harvesters by "
                f"{_ASSIGNOR!r}: if they are goharvest's, this harvester cannot run beside them",
                "stop them first; one that was killed stays in the group for three heartbeatTimeouts (15 s). Never "
                "name another leader_group_id while they run: both would publish the same table",
            )
        allowed = described.authorized_operations
        if allowed is not None and not {"READ", "ALL"} & {operation.name for operation in allowed}:
            return problem(subject, f"{group} may not be joined", grant("READ", self._config, f"the group {group}"))
        contenders = self.contenders(group)
        if not contenders:
            return warning(subject, f"no harvester is in {group}", "start one: `outbox harvest`")
        leaders = [contender.client_id for contender in contenders if contender.leads]
        who = f"led by {leaders[0]}" if leaders else "with no leader at this moment"
        return fine(subject, f"{len(contenders)} in {group}, {who}")

    def _look(self, subject: str, topic: str) -> TopicLook | Finding:
        """The topic; or what there is to say of one that cannot be looked at."""
        try:
            partitions = self._inquiry.partitions(topic)
        except TopicHidden as error:
            return problem(subject, str(error), grant("DESCRIBE, and what else it needs,", self._config, topic))
        if partitions == 0:
            return fine(subject, f"{topic} is not there yet; it is made when it is needed")
        look = self._inquiry.look_at(topic) if self._is_real else None
        return look or TopicLook(partitions, 0, None)

    def _rights(self, subject: str, topic: str, look: TopicLook, needed: set[str]) -> list[Finding]:
        missing = sorted(needed - look.allowed) if look.allowed is not None else []
        if not missing:
            return []
        listed = ", ".join(missing)
        detail = f"{topic}, on which {principal_of(self._config)} lacks the right(s) {listed}"
        return [problem(subject, detail, grant(listed, self._config, topic))]

    def _sizes(self, subject: str, topic: str, look: TopicLook, message_bytes: int) -> list[Finding]:
        """What keeps every message out: too small a limit, or more replicas asked for than there are."""
        settings = self._settings(topic)
        found = []
        limit = settings.get("max.message.bytes", "")
        if limit.isdecimal() and int(limit) < message_bytes:
            found.append(
                problem(
                    subject,
                    f"{topic} takes messages of up to {int(limit):,} bytes only",
                    f"kafka-configs.sh --alter --topic {topic} --add-config max.message.bytes={message_bytes} or more",
                )
            )
        in_sync = settings.get("min.insync.replicas", "")
        if in_sync.isdecimal() and 0 < look.replicas < int(in_sync):
            found.append(
                problem(
                    subject,
                    f"{topic} has {look.replicas} replica(s) and min.insync.replicas={in_sync}: it takes nothing",
                    "give it more replicas, or lower min.insync.replicas",
                )
            )
        return found

    def _settings(self, topic: str) -> dict[str, str]:
        """The topic's settings; none if they may not be read."""
        if topic not in self._known_settings:
            self._known_settings[topic] = {}
            if self._is_real:
                with suppress(KafkaException, FutureTimeoutError):
                    self._known_settings[topic] = self._inquiry.topic_settings(topic)
        return self._known_settings[topic]

    def _describe(self, group: str) -> Any:
        answer = self._inquiry.admin.describe_consumer_groups(
            [group], include_authorized_operations=self._is_real, request_timeout=self._inquiry.remaining
        )[group]
        try:
            return answer.result(self._inquiry.remaining)
        except FutureTimeoutError:
            raise self._inquiry.unavailable("no answer about the leader group") from None
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            raise self._inquiry.unavailable(f"the leader group {group!r} cannot be described: {cause.str()}") from None
