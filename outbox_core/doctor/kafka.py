"""Checks of `outbox doctor` and `outbox status` on a Kafka cluster, which create, join and write nothing."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Self

from outbox_core.doctor.findings import CommandLine, Commands, Finding, Verdict, fine, problem, warning
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.admin import Inquiry, TopicDescription, TopicHidden
from outbox_core.kafka.clients import ConfigResource, KafkaConfig, KafkaError, KafkaException
from outbox_core.kafka.errors import grant, principal_of
from outbox_core.kafka.topics import has_spare_partitions
from outbox_core.kafka.transactions import LOWER_TIMEOUT, TransactionsRefused, check_transactional_id
from outbox_core.topic_names import topic_problem

_ASSIGNOR = "cooperative-sticky"
CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 10.0
_USUAL_MESSAGE_BYTES = 1_048_588  # Kafka's default of max.message.bytes


class Contender(NamedTuple):
    """A harvester in the leader group."""

    client_id: str  # the harvester's name unless set otherwise
    host: str
    leads: bool  # it owns the leader topic's first partition, which a dead one keeps for up to a session


class KafkaConnecting:
    """A connection to the cluster, made on a thread while the database is asked. A context manager."""

    def __init__(self, config: KafkaConfig, commands: Commands | None = None, *, connect_seconds: float) -> None:
        self._pool = ThreadPoolExecutor(1, "outbox-doctor-kafka")
        self._made = self._pool.submit(KafkaChecks, config, commands, connect_seconds=connect_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        if self._made.exception() is None:
            self._made.result().close()

    def checks(self) -> KafkaChecks:
        """Wait for the connection and return its checks; the errors are those of their constructor."""
        checks = self._made.result()
        checks.begin()
        return checks


class KafkaChecks:
    """The checks of a harvester's needs in Kafka. Close it.

    The constructor raises KafkaUnavailable if the cluster does not answer within `connect_seconds`.
    """

    def __init__(
        self, config: KafkaConfig, commands: Commands | None = None, *, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        self._config = config
        self._commands = commands or CommandLine()
        self._known_settings: dict[str, dict[str, str]] = {}
        self._inquiry = Inquiry(config, connect_seconds)
        try:
            self._inquiry.cluster()
            self.begin()
            self._is_real = self._inquiry.can_create()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the client."""
        self._inquiry.close()

    def begin(self) -> None:
        """Begin to ask: the answers have ten seconds from now on."""
        self._inquiry.extend(_ANSWER_SECONDS)

    def cluster(self) -> Finding:
        """Count the brokers."""
        count = len(self._inquiry.cluster().brokers)
        return fine("cluster", f"answers, {count} broker{'' if count == 1 else 's'}")

    def leader_topic(self, topic: str) -> list[Finding]:
        """Check the topic of the election: one partition, or leadership moves whenever a harvester joins."""
        subject = "leader topic"
        found = self._described(subject, topic)
        if isinstance(found, Finding):
            return [found]
        wrong = self._wrong(subject, topic, found, {"READ", "WRITE"}, 4096)
        policy = self._settings(topic).get("cleanup.policy", "")
        if "compact" in policy:
            wrong.append(
                problem(
                    subject,
                    f"{topic} has cleanup.policy={policy}, so it refuses the leader's messages, which have no key",
                    self._alter(topic, "cleanup.policy=delete"),
                )
            )
        if found.partitions > 1:
            wrong.append(
                warning(
                    subject,
                    f"{topic} has {found.partitions} partitions: leadership may move whenever a harvester joins",
                    "name a fresh leaderTopic (leader_topic) for all harvesters",
                )
            )
        return wrong or [fine(subject, topic)]

    def tracking_topic(self, topic: str, *, needed: bool, manifest_bytes: int) -> list[Finding]:
        """Check the topic of manifests, which delivery other than exactly once uses only if it exists."""
        subject = "tracking topic"
        if needed and not self._is_real:
            return [problem(subject, "this cluster is a mock without transactions", "use a real broker")]
        found = self._described(subject, topic)
        if isinstance(found, Finding):
            return [found]
        settings = self._settings(topic)
        policy = settings.get("cleanup.policy", f"unknown: {grant('DESCRIBE_CONFIGS', self._config)}")
        is_too_wide = has_spare_partitions(found.partitions, settings)
        wrong = self._wrong(subject, topic, found, {"READ", "WRITE", "DESCRIBE_CONFIGS"}, manifest_bytes)
        if is_too_wide or policy != "compact":
            wrong.append(
                problem(
                    subject,
                    f"{topic} has {found.partitions} partition(s) and cleanup.policy={policy}, expected 1 and compact",
                    self._alter(topic, "cleanup.policy=compact")
                    if not is_too_wide
                    else "name a fresh trackingTopic (tracking_topic); if this one was in use: after "
                    "`outbox harvest --delivery at-least-once --drain`",
                )
            )
        return wrong or [fine(subject, topic)]

    def transactional_id(
        self, transactional_id: str, tracking_topic: str, *, needed: bool, timeout_ms: int
    ) -> list[Finding]:
        """Check the right to begin transactions, if there ever were any or will be, and their time-out."""
        if not self._is_real or not (needed or self._inquiry.describe(tracking_topic)):
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
        longest = self._longest_transaction_ms()
        if longest is not None and longest < timeout_ms:
            detail = f"the brokers let no transaction be open for {timeout_ms:,} ms, but for {longest:,} ms at most"
            return [problem("transactional.id", detail, LOWER_TIMEOUT)]
        return [fine("transactional.id", f"{transactional_id} may be used")]

    def _longest_transaction_ms(self) -> int | None:
        """Return the brokers' `transaction.max.timeout.ms`, or None if we may not read it."""
        broker = str(min(self._inquiry.cluster().brokers))
        try:
            return int(self._inquiry.settings_of(broker, ConfigResource.Type.BROKER)["transaction.max.timeout.ms"])
        except (KafkaException, KafkaUnavailable, KeyError, ValueError):
            return None

    def relay_topic(self, topic: str) -> list[Finding]:
        """Check the topic of a relay on Spark, if there ever was one: every leader settles its manifests first."""
        subject = "relay's topic"
        found = self._described(subject, topic)
        if isinstance(found, Finding):
            return [found] if found.verdict is Verdict.PROBLEM else []
        return self._rights(subject, topic, found, {"READ", "WRITE"}) or [fine(subject, topic)]

    def dead_letter_topic(self, topic: str) -> list[Finding]:
        """Check the topic for bad records."""
        subject = "dead-letter topic"
        found = self._described(subject, topic)
        if isinstance(found, Finding):
            return [found]
        return self._wrong(subject, topic, found, {"WRITE"}, 0) or [fine(subject, topic)]

    def topics(self, names: Collection[str], *, with_keyless: Collection[str] = ()) -> list[Finding]:
        """Check the topics of waiting records; for those of `with_keyless` some have no key."""
        known = self._inquiry.metadata().topics
        found = []
        for name in names:
            why = topic_problem(name)
            if why is not None:  # any writer may have named it: it must not come into a command that is to be typed
                remedy = (
                    f"correct kafka_topic of their rows and release them, or skip them: {self._commands.hold('list')}"
                )
                found.append(warning("topic", f"records wait for a topic that records cannot have: {why}", remedy))
            elif name not in known:
                found.append(
                    warning(
                        "topic",
                        f"records wait for {name}, which does not exist or may not be seen",
                        f"create it: `kafka-topics.sh {self._bootstrap} --create --topic {name}`, or "
                        f"{grant('DESCRIBE and WRITE', self._config)}; some brokers create it when it is first "
                        "written to",
                    )
                )
            else:
                found += self._existing_topic(name, has_keyless=name in with_keyless)
        return found or [fine("topics", f"all {len(names)} that records wait for are there")]

    def _existing_topic(self, topic: str, *, has_keyless: bool) -> list[Finding]:
        look = self._described("topic", topic)
        if not isinstance(look, TopicDescription):
            return []
        wrong = self._wrong("topic", topic, look, {"WRITE"}, 0)
        found = [warning("topic", f"records wait for {one.detail}", one.remedy) for one in wrong]
        return [*found, *self._compacted(topic)] if has_keyless else found

    def _compacted(self, topic: str) -> list[Finding]:
        policy = self._settings(topic).get("cleanup.policy", "")
        if "compact" not in policy:
            return []
        return [
            warning(
                "topic",
                f"records without a key wait for {topic}, which refuses them: its cleanup.policy is {policy}",
                self._alter(topic, "cleanup.policy=delete"),
            )
        ]

    @property
    def _bootstrap(self) -> str:
        return f"--bootstrap-server {self._config.get('bootstrap.servers', '')}"

    def _alter(self, topic: str, setting: str) -> str:
        return f"`kafka-configs.sh {self._bootstrap} --alter --topic {topic} --add-config {setting}`"

    def writers(self, topics: Collection[str]) -> Finding:
        """Name other principals that ACLs allow to write to the topics of harvesters.

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
        """Return the harvesters in the leader group, leader first."""
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
        """Check the leader group, and the right to join it."""
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
            return warning(subject, f"no harvester is in {group}", f"start one: {self._commands.harvest}")
        leaders = [contender.client_id for contender in contenders if contender.leads]
        who = f"led by {leaders[0]}" if leaders else "with no leader at this moment"
        return fine(subject, f"{len(contenders)} in {group}, {who}")

    def _described(self, subject: str, topic: str) -> TopicDescription | Finding:
        """Describe a topic, or return the finding that it cannot be described."""
        try:
            partitions = self._inquiry.partitions(topic)
        except TopicHidden as error:
            return problem(subject, str(error), grant("DESCRIBE, and what else it needs,", self._config, topic))
        if partitions == 0:
            return fine(subject, f"{topic} is not there yet; it is made when it is needed")
        look = self._inquiry.describe(topic) if self._is_real else None
        return look or TopicDescription(partitions, 0, None)

    def _wrong(
        self, subject: str, topic: str, found: TopicDescription, needed: set[str], message_bytes: int
    ) -> list[Finding]:
        return [*self._rights(subject, topic, found, needed), *self._sizes(subject, topic, found, message_bytes)]

    def _rights(self, subject: str, topic: str, found: TopicDescription, needed: set[str]) -> list[Finding]:
        missing = sorted(needed - found.allowed) if found.allowed is not None else []
        if not missing:
            return []
        listed = ", ".join(missing)
        detail = f"{topic}, on which {principal_of(self._config)} lacks the right(s) {listed}"
        return [problem(subject, detail, grant(listed, self._config, topic))]

    def _sizes(self, subject: str, topic: str, look: TopicDescription, message_bytes: int) -> list[Finding]:
        """Check limits that refuse every message: too small a size, or, before Kafka 4, too few replicas."""
        settings = self._settings(topic)
        found = []
        limit = settings.get("max.message.bytes", "")
        if limit.isdecimal() and int(limit) < message_bytes:
            found.append(
                problem(
                    subject,
                    f"{topic} takes messages of up to {int(limit):,} bytes only, and needs {message_bytes:,}",
                    self._alter(topic, f"max.message.bytes={max(message_bytes, _USUAL_MESSAGE_BYTES)}"),
                )
            )
        in_sync = settings.get("min.insync.replicas", "")
        if in_sync.isdecimal() and 0 < look.replicas < int(in_sync):
            found.append(
                warning(
                    subject,
                    f"{topic} has {look.replicas} replica(s) and min.insync.replicas={in_sync}: "
                    "brokers before Kafka 4 may refuse all records",
                    self._alter(topic, f"min.insync.replicas={look.replicas}"),
                )
            )
        return found

    def _settings(self, topic: str) -> dict[str, str]:
        if topic not in self._known_settings:
            self._known_settings[topic] = {}
            if self._is_real:
                with suppress(KafkaException, KafkaUnavailable):
                    self._known_settings[topic] = self._inquiry.settings_of(topic)
        return self._known_settings[topic]

    def _describe(self, group: str) -> Any:
        answer = self._inquiry.admin.describe_consumer_groups(
            [group], include_authorized_operations=self._is_real, request_timeout=self._inquiry.remaining
        )[group]
        try:
            return self._inquiry.wait_for(answer, "the leader group")
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            raise self._inquiry.unavailable(f"the leader group {group!r} cannot be described: {cause.str()}") from None
