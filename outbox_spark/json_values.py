"""JSON values by a declared schema, in Spark SQL: typed fields, or the reason of a misfit.

`from_json` alone takes the first of two objects, ignores text after one, and makes misfits NULL. So the text becomes
the first of two elements of a list within an object: text after it is then an error. A value that closes the list
(`{"n": 1}]} and more`) cuts off the second element, the seal, and cannot forge it: the names of list and seal are
secret. Fields declared NOT NULL are required, at any depth. Decimals are rounded to their scale, whole numbers never.
"""

from __future__ import annotations

import secrets
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, BooleanType, DataType, StringType, StructField, StructType

from outbox_core.errors import InvalidConfig

_CORRUPT = "_corrupt"
# One name for the life of the driver: with others, Spark would have to compile each batch anew.
_SECRET = secrets.token_hex(8)
SINGLE = f"single_{_SECRET}"
"""The array in the result of `parsed`; its first element has the value's fields."""
_SEAL = f"seal_{_SECRET}"  # of the second element
_EARLIEST_YEAR, _LATEST_YEAR = 1, 9999
# Spark writes a number for a decimal out in full before it looks whether it fits: some bytes cost hours, or the memory.
_HUGE_NUMBER = r"[:,\[]\s*+-?+[0-9.]++[eE][+-]?+[0-9]{4,}+\s*+[,}\]]"


def parse_schema(ddl: str) -> StructType:
    """Read a schema in Spark's DDL, for example `n BIGINT NOT NULL, lines ARRAY<STRUCT<...>>`. Raises InvalidConfig."""
    try:
        schema: Any = StructType.fromDDL(ddl)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidConfig(f"schema: is not Spark's DDL (`name TYPE, ...`): {reason}") from None
    if not isinstance(schema, StructType):
        raise InvalidConfig(f"schema: is {schema.simpleString()} without a name; write `name TYPE, ...`")
    names = [field.name.lower() for field in schema.fields]
    taken = sorted({name for name in names if name in ("record", "item", "_raw") or names.count(name) > 1})
    if not names or taken:
        raise InvalidConfig(f"schema: {f'the field {taken[0]!r} is twice or taken' if taken else 'has no fields'}")
    return schema


def parsed(text: Column, schema: StructType) -> Column:
    """Parse a value's text (NULL if it is not UTF-8) into a struct of `SINGLE` and `_corrupt`, for `problem`."""
    sealed = StructType([*schema.fields, StructField(_SEAL, BooleanType())])
    wrapper = StructType([StructField(SINGLE, ArrayType(sealed)), StructField(_CORRUPT, StringType())])
    options = {"columnNameOfCorruptRecord": _CORRUPT, "allowSingleQuotes": "false"}
    if _has_decimals(schema):
        text = F.when(~text.rlike(_HUGE_NUMBER), text)
    wrapped = F.concat(F.lit(f'{{"{SINGLE}":['), text, F.lit(f',{{"{_SEAL}":true}}]}}'))
    return F.from_json(wrapped, wrapper, options)


def problem(value: str, text: str, wrapped: str, schema: StructType) -> str:
    """Return a SQL expression of the reason of a misfit, or NULL, from SQL of a value's bytes, text and `parsed`."""
    element, seal = (f"get({wrapped}.{SINGLE}, {place})" for place in (0, 1))
    misfits = [
        f"CASE WHEN get_json_object({text}, {_path(field.name)}) IS NOT NULL AND {element}.{_name(field.name)} IS NULL "
        f"THEN '{_text(field.name)} is no {_text(field.dataType.simpleString().upper())}' END"
        for field in schema.fields
    ]
    is_huge = f"{text} RLIKE r'{_HUGE_NUMBER}'" if _has_decimals(schema) else "false"
    # CASE is lazy: both lists are evaluated only for misfits.
    return f"""CASE
        WHEN {value} IS NULL THEN NULL
        WHEN {text} IS NULL THEN 'the value is not UTF-8 text'
        WHEN {wrapped} IS NULL OR {wrapped}.{_CORRUPT} IS NOT NULL THEN
            CASE WHEN {is_huge} THEN 'a number has an exponent of more than three digits'
                 WHEN try_parse_json({text}) IS NULL THEN 'the value is not JSON'
                 WHEN {text} NOT LIKE '%{{%' OR ltrim({text}) NOT LIKE '{{%' THEN 'the value is not a JSON object'
                 ELSE concat('the value does not fit the schema: ',
                             coalesce(nullif({_joined(misfits)}, ''), 'a field within a field, or text behind it')) END
        WHEN size({wrapped}.{SINGLE}) != 2 OR {element} IS NULL OR {seal}.{_SEAL} IS NULL THEN
            'the value is not one JSON object'
        {unmet(element, schema)}
        END"""


def _has_decimals(schema: StructType) -> bool:
    return "decimal" in schema.simpleString()


def unmet(value: str, schema: StructType) -> str:
    """Return the WHENs of a SQL expression of what a typed value lacks, or has beyond what other systems hold."""
    missing = [f"CASE WHEN {condition} THEN '{_text(path)}' END" for path, condition in _missing(schema, value, "")]
    wild = [f"CASE WHEN {condition} THEN '{_text(path)}' END" for path, condition in _out_of_calendar(schema, value)]
    years = f"a time is not within the years {_EARLIEST_YEAR} to {_LATEST_YEAR}: "
    return _when("a field that must be there is missing: ", missing) + _when(years, wild)


def _when(words: str, cases: list[str]) -> str:
    return f"WHEN {_joined(cases)} != '' THEN concat('{words}', {_joined(cases)}) " if cases else ""


def _joined(cases: list[str]) -> str:
    return f"concat_ws(', ', {', '.join(cases)})"


def _missing(schema: StructType, value: str, path: str) -> list[tuple[str, str]]:
    """Return the path of each required field, and the condition under which it is missing."""
    found = []
    for field in schema.fields:
        here, name = f"{value}.{_name(field.name)}", f"{path}{field.name}"
        if not field.nullable:
            found.append((name, f"{here} IS NULL"))
        found += [
            (inner, f"{here} IS NOT NULL AND {condition}") for inner, condition in _within(field.dataType, here, name)
        ]
    return found


def _within(kind: DataType, value: str, path: str) -> list[tuple[str, str]]:
    if isinstance(kind, StructType):
        return _missing(kind, value, f"{path}.")
    if isinstance(kind, ArrayType):
        variable = f"e{path.count('[')}"
        inner = _within(kind.elementType, variable, f"{path}[]")
        return [(name, f"exists({value}, {variable} -> {condition})") for name, condition in inner]
    return []


def _out_of_calendar(schema: StructType, value: str) -> list[tuple[str, str]]:
    """Return the dates and times at the top level, and the condition under which other systems cannot hold them."""
    return [
        (field.name, f"year({value}.{_name(field.name)}) NOT BETWEEN {_EARLIEST_YEAR} AND {_LATEST_YEAR}")
        for field in schema.fields
        if field.dataType.typeName() in ("date", "timestamp", "timestamp_ntz")
    ]


def _name(field: str) -> str:
    return "`" + field.replace("`", "``") + "`"


def _path(field: str) -> str:
    return "'$[\\'" + _text(field) + "\\']'"


def _text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
