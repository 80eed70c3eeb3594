"""Records as typed rows, in Spark SQL: JSON values by a declared schema, `columns`, `explode` and `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.errors import InvalidConfig
from outbox_spark import json_values
from outbox_spark.config import ProjectSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_UNREADABLE = "a header name is not UTF-8, so the headers, the outbox-id among them, cannot be read"


def parse(records: DataFrame, settings: ProjectSettings) -> DataFrame:
    """Add a `problem` (reason of a misfit, or NULL) and `rows` (array of structs) to records. Raises InvalidConfig."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F  # noqa: N812

    schema = json_values.parse_schema(settings.value_schema)
    text = F.expr("try_validate_utf8(cast(value AS STRING))")
    found = records.select("*", text.alias("_text")).withColumn("_parsed", json_values.parsed(F.col("_text"), schema))
    record = F.struct(
        F.expr("coalesce(outbox_id, concat_ws('-', topic, partition, offset))").alias("outbox_id"),
        F.expr("try_validate_utf8(cast(key AS STRING))").alias("key"),
        *("topic", "partition", "offset", "timestamp", F.col("header_list").alias("headers")),
    )
    of_value = json_values.problem("value", "_text", "_parsed", schema)
    reason = F.expr(f"CASE WHEN header_list IS NULL THEN '{_UNREADABLE}' ELSE {of_value} END").alias("problem")
    # The value's fields may have any name: everything else is within these two.
    fields = [F.get(f"_parsed.{json_values.SINGLE}", 0)[field.name].alias(field.name) for field in schema.fields]
    named = found.select(record.alias("record"), F.struct("key", "value", reason).alias("_raw"), *fields)
    rows = f"IF(_raw.problem IS NULL AND _raw.value IS NOT NULL, {_rows(settings, schema)}, NULL)"
    try:
        return named.select(
            *(f"record.{name}" for name in ("outbox_id", "topic", "partition", "offset", "timestamp")),
            *("_raw.key", "_raw.value", F.col("record.headers").alias("headers"), "_raw.problem"),
            F.expr(rows).alias("rows"),
        )
    except (AnalysisException, ParseException) as error:
        raise InvalidConfig(f"columns, where or explode: {str(error).strip().splitlines()[0]}") from None


def _rows(settings: ProjectSettings, schema: StructType) -> str:
    names = settings.columns or {name: f"`{name}`" for name in schema.names}
    row = "struct(" + ", ".join(f"({expression}) AS `{name}`" for name, expression in names.items()) + ")"
    where = f"coalesce(({settings.where}), false)" if settings.where else "true"
    if settings.explode is None:
        return f"IF({where}, array({row}), array())"
    items = f"coalesce({settings.explode}, array())"
    return f"transform(filter({items}, item -> {where}), item -> {row})"


def columns_of(spark: SparkSession, settings: ProjectSettings) -> dict[str, DataType]:
    """Return the projected columns with their types. Raises InvalidConfig if an expression is wrong."""
    from outbox_spark.topics.source import SCHEMA

    fields = parse(spark.createDataFrame([], SCHEMA), settings).schema["rows"].dataType.elementType.fields  # type: ignore[attr-defined]
    return {field.name: field.dataType for field in fields}
