"""Records as typed rows, in Spark SQL: values by a declared schema, `columns`, `explode` and `where`."""

from __future__ import annotations

from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from outbox_core.errors import InvalidConfig
from outbox_spark import json_values, registry_values
from outbox_spark.config import RowSettings
from outbox_spark.topics.source import SCHEMA

_UNREADABLE = "a header name is not UTF-8, so the headers, the outbox-id among them, cannot be read"
_ID = "r'^(?s)(.+):([0-9]{1,18})$'"
_EARLIEST_YEAR, _LATEST_YEAR = 1, 9999
_KEY = "try_validate_utf8(cast(key AS STRING))"
_REQUIRED = ("id", "source", "type")
_OPTIONAL = ("subject", "dataschema")


def _event() -> str:
    """Return a SQL expression of a CloudEvent in binary mode, its data apart; NULL for other records."""
    attributes = {name: f"try_validate_utf8(cast(headers['ce_{name}'] AS STRING))" for name in (*_REQUIRED, *_OPTIONAL)}
    columns = [f"{text} AS {name}" for name, text in attributes.items()]
    columns.append("try_cast(cast(headers['ce_time'] AS STRING) AS TIMESTAMP) AS time")
    columns.append("try_validate_utf8(cast(headers['content-type'] AS STRING)) AS datacontenttype")
    own = ", ".join(f"'ce_{name}'" for name in (*attributes, "specversion", "time"))
    others = f"map_filter(headers, (name, _) -> startswith(name, 'ce_') AND name NOT IN ({own}))"
    texts = f"transform_values({others}, (_, item) -> try_validate_utf8(cast(item AS STRING)))"
    columns.append(f"transform_keys({texts}, (name, _) -> substring(name, 4)) AS extensions")
    is_event = " AND ".join(
        ["headers['ce_specversion'] = X'312E30'", *(f"{attributes[name]} != ''" for name in _REQUIRED)]
    )
    return f"IF({is_event}, struct({', '.join(columns)}), NULL)"


_EVENT = _event()


def is_replay(header_name: str) -> Column:
    """Return a column that tells by the `headers` whether a record is a replay."""
    return F.coalesce(F.exists("headers", lambda header: header["key"] == header_name), F.lit(False))


def outbox_in(outbox_id: str) -> str:
    """Return a SQL expression of the outbox's name in an id; NULL in one of another form."""
    return f"nullif(regexp_extract({outbox_id}, {_ID}, 1), '')"


def number_in(outbox_id: str) -> str:
    """Return a SQL expression of the number in an id, which grows with every record of its outbox; else NULL."""
    return f"try_cast(regexp_extract({outbox_id}, {_ID}, 2) AS BIGINT)"


def parse(records: DataFrame, settings: RowSettings, *, keyed: bool = False) -> DataFrame:
    """Add `key_text`, a `problem` (reason of a misfit, or NULL) and `rows` (array of structs) to records.

    With `keyed`, records without a key are misfits. Raises InvalidConfig.
    """
    schema = json_values.parse_schema(settings.value_schema)
    found, values, of_value = _typed(records, settings, schema)
    expressions = " ".join([*settings.columns.values(), settings.where or "", settings.explode or ""])
    record = F.struct(
        F.expr("coalesce(outbox_id, concat_ws('-', topic, partition, offset))").alias("outbox_id"),
        F.expr(_KEY).alias("key"),
        *("topic", "partition", "offset", "timestamp", F.col("header_list").alias("headers")),
        # Its many headers are not read for nothing.
        *((F.expr(_EVENT).alias("event"),) if "event" in expressions.lower() else ()),
    )
    whens = [
        ("header_list IS NULL", _UNREADABLE),
        ("contains(outbox_id, '\ufffd')", "the outbox-id is not UTF-8 text"),
        (f"key IS NOT NULL AND {_KEY} IS NULL", "the key is not UTF-8 text"),
    ]
    if keyed:
        whens.append(("key IS NULL", "there is no key, by which the latest record could be known"))
    cases = " ".join(f"WHEN {condition} THEN '{words}'" for condition, words in whens)
    reason = F.expr(f"CASE {cases} ELSE {of_value} END").alias("problem")
    # The value's fields may have any name: everything else is within these two.
    fields = [F.expr(value).alias(name) for name, value in values.items()]
    named = found.select(record.alias("record"), F.struct("key", "value", reason).alias("_raw"), *fields)
    rows = f"IF(_raw.problem IS NULL AND _raw.value IS NOT NULL, {_rows(settings, schema)}, NULL)"
    try:
        found = named.selectExpr(
            *(f"record.{name}" for name in ("outbox_id", "topic", "partition", "offset", "timestamp")),
            *("_raw.key", "_raw.value", "record.key AS key_text", "record.headers", "_raw.problem", f"{rows} AS rows"),
        )
    except (AnalysisException, ParseException) as error:
        raise InvalidConfig(f"columns, where or explode: {str(error).strip().splitlines()[0]}") from None
    return _storable(found)


def _storable(found: DataFrame) -> DataFrame:
    """Make misfits of records whose rows have what other systems do not hold, parsed or made by an expression."""
    row: Any = found.schema["rows"].dataType
    whens = [
        f"WHEN exists(rows, row -> {condition}) THEN '{json_values.sql_text(field.name)} {words}'"
        for field in row.elementType.fields
        for words, condition in _unstorable(field.dataType, f"row.{json_values.sql_name(field.name)}")
    ]
    if not whens:
        return found
    checked = found.withColumn("problem", F.expr(f"coalesce(problem, CASE {' '.join(whens)} END)"))
    return checked.withColumn("rows", F.expr("IF(problem IS NULL, rows, NULL)"))


def _typed(records: DataFrame, settings: RowSettings, schema: StructType) -> tuple[DataFrame, dict[str, str], str]:
    """Add the typed value; return SQL expressions of its fields, and of the reason of a misfit."""
    if settings.registry is not None:
        read = registry_values.decoded(settings.format, settings.registry, schema)
        found = records.withColumn("_read", read("value", "topic", "header_list"))
        unmet = json_values.unmet("_read.value", schema)
        return (
            found,
            {name: f"_read.value.{json_values.sql_name(name)}" for name in schema.names},
            f"CASE WHEN value IS NULL THEN NULL WHEN _read.problem IS NOT NULL THEN _read.problem {unmet}END",
        )
    # No JSON begins with the byte 0, with which serializers for a registry begin; the schema's id is behind it.
    text = F.expr("try_validate_utf8(cast(IF(startswith(value, X'00'), substring(value, 6), value) AS STRING))")
    found = records.select("*", text.alias("_text")).withColumn("_parsed", json_values.parsed(F.col("_text"), schema))
    of_value = json_values.problem("value", "_text", "_parsed", schema)
    return found, json_values.fields("_parsed", schema), of_value


def _unstorable(kind: DataType, value: str, depth: int = 0) -> list[tuple[str, str]]:
    """Return the words for what other systems do not hold of a type, and the SQL conditions under which it is there."""
    variable = f"t{depth}"
    if isinstance(kind, StringType):
        return [("is not UTF-8 text", f"NOT is_valid_utf8({value})")]  # Spark's CAST makes such text
    if isinstance(kind, DateType | TimestampType | TimestampNTZType):
        years = f"{_EARLIEST_YEAR} AND {_LATEST_YEAR}"
        return [(f"is not within the years {_EARLIEST_YEAR} to {_LATEST_YEAR}", f"year({value}) NOT BETWEEN {years}")]
    if isinstance(kind, StructType):
        return [
            found
            for field in kind.fields
            for found in _unstorable(field.dataType, f"{value}.{json_values.sql_name(field.name)}", depth)
        ]
    if isinstance(kind, ArrayType):
        parts = [(kind.elementType, value)]
    elif isinstance(kind, MapType):
        parts = [(kind.keyType, f"map_keys({value})"), (kind.valueType, f"map_values({value})")]
    else:
        return []
    return [
        (words, f"exists({values}, {variable} -> {condition})")
        for element, values in parts
        for words, condition in _unstorable(element, variable, depth + 1)
    ]


def _rows(settings: RowSettings, schema: StructType) -> str:
    names = settings.columns or {name: f"`{name}`" for name in schema.names}
    row = "struct(" + ", ".join(f"({expression}) AS `{name}`" for name, expression in names.items()) + ")"
    where = f"coalesce(({settings.where}), false)" if settings.where else "true"
    if settings.explode is None:
        return f"IF({where}, array({row}), array())"
    items = f"coalesce({settings.explode}, array())"
    return f"transform(filter({items}, item -> {where}), item -> {row})"


def project(records: DataFrame, settings: RowSettings, *, keyed: bool = False) -> DataFrame:
    """Turn rows of `outbox_kafka` into typed rows, by the settings `value_schema`, `explode`, `columns` and `where`.

    They have the settings' columns behind `_outbox_id`, `_row` (the number within the record), `_topic`, `_key`,
    `_partition`, `_offset`, `_time` and `_problem`. A misfit is one row without values that has the reason in
    `_problem`; with `keyed`, a record without a key is one. Tombstones have no row.
    """
    rows = parse(records, settings, keyed=keyed).selectExpr(
        *("outbox_id AS _outbox_id", "topic AS _topic", "key_text AS _key", "partition AS _partition"),
        *("offset AS _offset", "timestamp AS _time", "problem AS _problem"),
        "posexplode(IF(problem IS NULL, rows, array(NULL))) AS (_row, _values)",
    )
    order = ("_outbox_id", "_row", "_topic", "_key", "_partition", "_offset", "_time", "_problem")
    return rows.select(*order, "_values.*")


def changes(records: DataFrame, settings: RowSettings) -> DataFrame:
    """Turn rows of `outbox_kafka` into change events, one for each record: a source for AutoCDC.

    They have the settings' columns behind `_topic`, `_key`, `_sequence`, `_deleted` and `_problem`. `_sequence` orders
    the events of a key: it is the number in the `outbox-id`, so that repeats and replays change nothing, or, without
    such an id, the offset. `_deleted` are tombstones, and records that do not meet `where`; misfits, records without a
    key among them, have no values, and the reason in `_problem`.

    Raises:
        InvalidConfig: the settings have `explode`: an event is one row.
    """
    if settings.explode is not None:
        raise InvalidConfig("explode: a change event is one row")
    return (
        parse(records, settings, keyed=True)
        .selectExpr(
            *("topic AS _topic", "key_text AS _key", f"coalesce({number_in('outbox_id')}, offset) AS _sequence"),
            *("problem IS NULL AND coalesce(array_size(rows), 0) = 0 AS _deleted", "problem AS _problem"),
            "get(rows, 0) AS _values",
        )
        .select("_topic", "_key", "_sequence", "_deleted", "_problem", "_values.*")
    )


def columns_of(spark: SparkSession, settings: RowSettings) -> dict[str, DataType]:
    """Return the projected columns with their types. Raises InvalidConfig if an expression is wrong."""
    fields = parse(spark.createDataFrame([], SCHEMA), settings).schema["rows"].dataType.elementType.fields  # type: ignore[attr-defined]
    return {field.name: field.dataType for field in fields}
