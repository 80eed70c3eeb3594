"""Rows that a hostile writer with INSERT alone can put into an outbox, and that the harvester must survive.

Each is data, for the tests and for the chaos ingredient. A row either is held, with a reason that names its column, or
is odd and yet a record, which arrives. Where the table has its constraints (`TableName`'s DDL), the database itself
refuses the rows with `is_constrained`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from psycopg import sql

Ending = Literal["held", "published", "either"]

SMALLEST_ID, LARGEST_ID = -(2**63), 2**63 - 1
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class OutboxNames:
    """The names that a writer must know to attack an outbox: its topics, as they are called by default."""

    leader: str
    tracking: str
    relay: str
    dead_letters: str
    transactional_id: str

    @classmethod
    def of(cls, identity: str) -> "OutboxNames":
        """Return those of an outbox with this identity, `<database>.<schema>.<table>`, and default settings."""
        return cls(
            leader=f"{identity}.neli",
            tracking=f"{identity}.manifests",
            relay=f"{identity}.relay-manifests",
            dead_letters=f"{identity}.dead-letter",
            transactional_id=f"kafka-outbox:{identity}",
        )


@dataclass(frozen=True)
class HostileRow:
    """One row.

    Attributes:
        name: short, fit for a test's id.
        columns: column -> value; others keep their defaults. Without a key unless one is named.
        why: the harm that it did to 592f1f3.
        ends: whether it must be `held`, must arrive (`published`), or may do either, as long as others are not hurt.
        column: the column that a hold's reason names.
        is_constrained: whether the table's CHECK constraints refuse it.
        is_heavy: whether it is a MiB or more: writers that repeat these need room.
    """

    name: str
    columns: Mapping[str, Any]
    why: str
    ends: Ending = "held"
    column: str = ""
    is_constrained: bool = False
    is_heavy: bool = False

    @property
    def own_id(self) -> bool:
        """Tell whether it names its id: then it can be written only once."""
        return "id" in self.columns


def insert(table: str, row: HostileRow) -> tuple[sql.Composed, list[Any]]:
    """Return the statement that writes a row, and its parameters; `table` is quoted already if it must be."""
    columns = {"create_time": "now", **row.columns}
    statement = sql.SQL("INSERT INTO {table} ({columns}) VALUES ({values})").format(
        table=sql.SQL(table),
        columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
        values=sql.SQL(", ").join(_placeholder(name) for name in columns),
    )
    return statement, list(columns.values())


def _placeholder(column: str) -> sql.Composable:
    types = {"create_time": "timestamptz", "leader_id": "uuid", "id": "bigint", "kafka_partition": "integer"}
    types |= {"kafka_header_keys": "text[]", "kafka_header_values": "bytea[]"}
    return sql.SQL("%s::" + types[column]) if column in types else sql.SQL("%s")


def hostile_rows(names: OutboxNames, topic: str) -> Sequence[HostileRow]:
    """Return every hostile row of the reviews, for an outbox with these names that publishes to this topic."""
    return [
        *_control_topics(names),
        *_illegal_topics(),
        *_partitions(topic),
        *_headers(topic),
        *_ids(topic),
        *_times_and_marks(topic),
        *_sizes(topic),
    ]


def _control_topics(names: OutboxNames) -> list[HostileRow]:
    forged = b'{"version":1,"outbox":"x","ids":[1],"create_times":[0]}'
    claim = b'{"type":"claim","id":"6f1f7f0e-35b1-4f5c-8d34-0c6f7a1d2f11"}'
    rows = [
        ("tracking-manifest", names.tracking, forged, "deletes rows of others at the next leadership (C1)"),
        ("tracking-garbage", names.tracking, b"garbage", "no harvester starts any more (C1)"),
        ("relay-manifest", names.relay, forged, "deletes rows of others, exactly once too (C1)"),
        ("leader-claim", names.leader, claim, "deposes the leader (H4)"),
        ("dead-letters", names.dead_letters, b"x", "a letter that none of the harvesters wrote"),
        (
            "other-dead-letters",
            "another.public.outbox.dead-letter",
            b"x",
            "a letter that another outbox's console shows",
        ),
        ("other-neli", "another.public.outbox.neli", claim, "deposes another outbox's leader"),
        ("other-manifests", "another.public.outbox.manifests", forged, "deletes another outbox's rows"),
        ("other-relay-manifests", "another.public.outbox.relay-manifests", forged, "the same through its relay"),
        ("consumer-offsets", "__consumer_offsets", b"x", "ends each transaction's producer: nothing flows (C2)"),
        ("transaction-state", "__transaction_state", b"x", "the same (C2)"),
        ("internal", "__share_group_state", b"x", "Kafka's own"),
    ]
    return [
        HostileRow(
            name,
            {"kafka_topic": to, "kafka_key": names.transactional_id, "kafka_value": value, "kafka_partition": 0},
            why,
            column="kafka_topic",
        )
        for name, to, value, why in rows
    ]


def _illegal_topics() -> list[HostileRow]:
    topics = [
        ("topic-empty", ""),
        ("topic-space", "no topic!"),
        ("topic-dots", ".."),
        ("topic-slash", "a/b"),
        ("topic-escape", "\x1b]0;owned\x07"),
        ("topic-line-break", "x\nWARNING forged line"),
        ("topic-unicode", "bestellungen-für-alle"),
    ]
    return [
        HostileRow(name, {"kafka_topic": topic, "kafka_value": b"x"}, "no topic's name", column="kafka_topic")
        for name, topic in topics
    ]


def _partitions(topic: str) -> list[HostileRow]:
    def row(partition: int, *, why: str, is_constrained: bool) -> HostileRow:
        name = f"partition{partition:+d}"
        columns = {"kafka_topic": topic, "kafka_value": b"x", "kafka_partition": partition}
        return HostileRow(name, columns, why, column="kafka_partition", is_constrained=is_constrained)

    return [
        row(-2, why="parks its topic (C3)", is_constrained=True),
        row(-5, why="parks its topic (C3)", is_constrained=True),
        row(-(2**31), why="parks its topic (C3)", is_constrained=True),
        row(2**31 - 1, why="no topic has so many", is_constrained=False),
        HostileRow(
            "partition-1",
            {"kafka_topic": topic, "kafka_value": b"x", "kafka_partition": -1},
            "what the harvester takes NULL for",
            ends="either",
            column="kafka_partition",
            is_constrained=True,
        ),
    ]


def _headers(topic: str) -> list[HostileRow]:
    def row(
        name: str, keys: list[Any], values: list[Any], why: str, *, ends: Ending = "held", is_constrained: bool = False
    ) -> HostileRow:
        columns = {
            "kafka_topic": topic,
            "kafka_value": b"x",
            "kafka_header_keys": keys,
            "kafka_header_values": values,
        }
        return HostileRow(name, columns, why, ends, column="kafka_header", is_constrained=is_constrained)

    return [
        row("more-names", ["a", "b"], [b"1"], "no message", is_constrained=True),
        row("more-values", ["a"], [b"1", b"2"], "no message", is_constrained=True),
        row("names-alone", ["a"], [], "no message", is_constrained=True),
        row("name-null", [None], [b"1"], "a header has a name"),
        row("name-empty", [""], [b"1"], "Kafka takes it", ends="published"),
        row("value-null", ["a"], [None], "Kafka takes it", ends="published"),
        row("names-nested", [["a", "b"]], [[b"1", b"2"]], "an array of two dimensions"),
        row(
            "forged-id",
            ["outbox-id"],
            [b"another.public.outbox:1"],
            "an inbox takes the real one for a repeat (M2)",
            ends="published",
        ),
        row("forged-origin", ["outbox-original-topic"], [b"elsewhere"], "looks like a dead letter", ends="either"),
    ]


def _ids(topic: str) -> list[HostileRow]:
    legal, illegal = {"kafka_topic": topic, "kafka_value": b"x"}, {"kafka_topic": "no topic!", "kafka_value": b"x"}
    return [
        HostileRow("id-zero", {"id": 0, **legal}, "below every drawn id", "either", "id", is_constrained=True),
        HostileRow("id-negative", {"id": -7, **legal}, "below every drawn id", "either", "id", is_constrained=True),
        HostileRow(
            "id-smallest",
            {"id": SMALLEST_ID, **legal},
            "never published, and a drain never ends (H1)",
            "either",
            "id",
            is_constrained=True,
        ),
        HostileRow("id-largest", {"id": LARGEST_ID, **legal}, "ends the harvester (H1)", "either", "id"),
        HostileRow(
            "id-largest-held",
            {"id": LARGEST_ID - 1, **illegal},
            "its hold ends every harvester at each start, if it is the last id (H1)",
            column="kafka_topic",
        ),
    ]


def _times_and_marks(topic: str) -> list[HostileRow]:
    def row(name: str, column: str, value: Any, why: str, *, is_constrained: bool = False) -> HostileRow:
        columns = {"kafka_topic": topic, "kafka_value": b"x", column: value}
        return HostileRow(name, columns, why, "either", column, is_constrained)

    return [
        row(
            "time-last",
            "create_time",
            "294276-12-31 23:59:59+00",
            "out of range at each scan (H1)",
            is_constrained=True,
        ),
        row("time-infinite", "create_time", "infinity", "no number", is_constrained=True),
        row("time-minus-infinite", "create_time", "-infinity", "no number, and no JSON (L7)"),
        row("time-first", "create_time", "4713-01-02 00:00:00+00 BC", "far below zero"),
        row("mark", "leader_id", str(UUID(int=2**127 + 5)), "exactly once refuses to start (H1)"),
        row("mark-zero", "leader_id", str(UUID(int=0)), "looks like a relay's"),
    ]


def _sizes(topic: str) -> list[HostileRow]:
    def row(name: str, column: str, columns: Mapping[str, Any], why: str, *, ends: Ending = "held") -> HostileRow:
        return HostileRow(name, {"kafka_topic": topic, **columns}, why, ends, column, is_heavy=True)

    return [
        row("key-large", "kafka_key", {"kafka_key": "k" * (1536 * KIB), "kafka_value": b"x"}, "gigabytes of keys (H2)"),
        row("value-large", "kafka_value", {"kafka_value": b"v" * (4 * MIB)}, "fetched in whole to be refused (H2)"),
        row(
            "header-name-large",
            "header",
            {"kafka_value": b"x", "kafka_header_keys": ["n" * (1536 * KIB)], "kafka_header_values": [b"1"]},
            "header names were not counted (H2)",
        ),
        row(
            "header-value-large",
            "header",
            {"kafka_value": b"x", "kafka_header_keys": ["n"], "kafka_header_values": [b"0" * (1536 * KIB)]},
            "counted as compressed (H2)",
        ),
        row(
            "many-headers",
            "kafka_header",
            {"kafka_value": b"x", "kafka_header_keys": ["n"] * 10_000, "kafka_header_values": [b"1"] * 10_000},
            "Kafka takes it",
            ends="either",
        ),
    ]
