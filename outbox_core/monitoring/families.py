"""The families of a harvester's metrics. docs/metrics.md has the same table; a test compares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class FamilyDefinition(NamedTuple):
    """A family: its type, its name (without the `_total` of counters), its help and its labels."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    labels: tuple[str, ...] = ("outbox",)


_TOPIC = ("outbox", "topic")

COUNTERS = {
    "published": ("outbox_records_published", "Records acknowledged by Kafka."),
    "errors": ("outbox_publish_errors", "Records that Kafka refused or did not acknowledge in time."),
    "dead_letters": ("outbox_dead_letters", "Records published to the dead-letter topic."),
}
GAUGES = {
    "holds": ("outbox_holds", "Records, keys and topics that are held."),
    "waiting_destinations": (
        "outbox_waiting_destinations",
        "Topics, partitions and keys that are tried again after a backoff.",
    ),
    "waiting_keys": ("outbox_waiting_keys", "Keys, and records without one, that wait for a destination or a retry."),
    "send_wait": ("outbox_send_wait_seconds", "Time without a send, as heartbeats come back too late."),
    "in_flight": ("outbox_in_flight_records", "Records sent and not yet acknowledged."),
    "leader": ("outbox_leader", "1 where this harvester leads, else 0."),
}
_SAMPLED_GAUGES = {  # taken over from the last count of the backlog and the last state of the floor
    "pending": ("outbox_pending_records", "Records in the outbox table."),
    "oldest_age": ("outbox_oldest_pending_age_seconds", "Age of the first record in the outbox table."),
    "deliverable": ("outbox_deliverable_records", "Records in the outbox table that no hold keeps back."),
    "deliverable_age": ("outbox_oldest_deliverable_age_seconds", "Age of the first record that no hold keeps back."),
    "held": ("outbox_held_records", "Records in the outbox table that a hold keeps back."),
    "held_age": ("outbox_oldest_held_age_seconds", "Age of the first record that a hold keeps back."),
    "time_to_empty": (
        "outbox_time_to_empty_seconds",
        "Time until no deliverable record is left, at the rate of the last minute.",
    ),
    "leader_term": (
        "outbox_leader_term",
        "Number of the leadership, where this harvester leads; a later one has a higher number.",
    ),
    "kafka_up": ("outbox_kafka_up", "1 if Kafka answers this harvester, else 0."),
    "last_success": ("outbox_last_success_timestamp_seconds", "Time of the last acknowledgement by Kafka."),
    "floor_enabled": ("outbox_floor_enabled", "1 where a settled floor can be proven, else 0 (the log says why)."),
    "floor_distance": ("outbox_floor_distance_ids", "Ids between the settled floor and the last one drawn."),
    "stragglers": ("outbox_floor_stragglers", "Open transactions that the settled floor waits for."),
    "straggler_age": (
        "outbox_floor_oldest_straggler_seconds",
        "Time for which the settled floor has waited for the first of them.",
    ),
}
HISTOGRAMS = {
    "publish_latency": ("outbox_publish_latency_seconds", "Time from sending a record to its acknowledgement."),
    "mark_duration": ("outbox_mark_duration_seconds", "Duration of the statements that mark records."),
    "purge_duration": ("outbox_purge_duration_seconds", "Duration of the statements that delete published records."),
    "purge_records": ("outbox_purge_records", "Records that one such statement deletes."),
}

DEFINITIONS: dict[str, FamilyDefinition] = {
    **{key: FamilyDefinition("counter", *of) for key, of in COUNTERS.items()},
    **{key: FamilyDefinition("gauge", *of) for key, of in (GAUGES | _SAMPLED_GAUGES).items()},
    **{key: FamilyDefinition("histogram", *of) for key, of in HISTOGRAMS.items()},
    "bytes": FamilyDefinition("counter", "outbox_published_bytes", "Bytes of the values acknowledged by Kafka."),
    "delivery_latency": FamilyDefinition(
        "histogram",
        "outbox_delivery_latency_seconds",
        "Time from a record's create_time to its acknowledgement by Kafka.",
    ),
    "topic_published": FamilyDefinition(
        "counter", "outbox_topic_records_published", "Records acknowledged by Kafka, by topic.", _TOPIC
    ),
    "topic_deliverable": FamilyDefinition(
        "gauge", "outbox_topic_deliverable_records", "Records that no hold keeps back, by topic.", _TOPIC
    ),
    "topic_held": FamilyDefinition(
        "gauge", "outbox_topic_held_records", "Records that a hold keeps back, by topic.", _TOPIC
    ),
    "build": FamilyDefinition(
        "gauge", "outbox_build_info", "1; the labels are versions.", ("outbox", "version", "python")
    ),
}
"""All families, by the key under which `HarvestMetrics` knows them."""

_MAKERS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Families:
    """The empty families of a scrape."""

    def __init__(self, definitions: Mapping[str, FamilyDefinition] = DEFINITIONS) -> None:
        self._made = {key: _MAKERS[of.kind](of.name, of.text, labels=of.labels) for key, of in definitions.items()}

    def add(self, key: str, value: float, *labels: str) -> None:
        """Add a sample to a counter or gauge."""
        self._made[key].add_metric(labels, value)

    def histogram(self, key: str) -> HistogramMetricFamily:
        """Return a histogram's family."""
        family = self._made[key]
        if not isinstance(family, HistogramMetricFamily):
            raise TypeError(f"{key} is no histogram")
        return family

    def all(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._made.values()
