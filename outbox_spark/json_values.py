"""JSON values by a declared schema, in Spark SQL: typed fields, or the reason of a misfit.

`from_json` alone takes the first of two objects, ignores text after one, and makes misfits NULL. So the text becomes
the first of two elements of a list within an object: text after it is then an error. A value that closes the list
(`{"n": 1}]} and more`) cuts off the second element, the seal, and cannot forge it: the names of list and seal are
secret. Fields declared NOT NULL are required, at any depth. Decimals are rounded to their scale, whole numbers never.

Decimals are read as VARIANT, at any depth. `from_json` writes a number for a decimal out in full before it looks
whether it fits, also a quoted one: 25 bytes cost hours (`"1e64000000"`), and a million digits minutes. A cast of short
text looks at the number of digits first. VARIANT keeps a number exactly, but one with an exponent, or of more than 38
digits, as a double: where that may have lost digits, it is a misfit.
"""

from __future__ import annotations

import secrets
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from outbox_core.errors import InvalidConfig

_CORRUPT = "_corrupt"
# One name for the life of the driver: with others, Spark would have to compile each batch anew.
_SECRET = secrets.token_hex(8)
SINGLE = f"single_{_SECRET}"
"""The array in the result of `parsed`; its first element has the value's fields."""
_SEAL = f"seal_{_SECRET}"  # of the second element
_LONGEST_DECIMAL = 1_000  # bytes of its text: as many as Spark takes of a number that is not quoted
# A number that a double may not hold: it holds 15 digits. A run of digits is looked at from its beginning only.
_LONG_NUMBER = r"(?<![0-9.])(?:(?:[0-9]{16,}+|[0-9.]{17,}+)[eE]|[0-9.]{39})"


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
    """Parse a value's text (NULL if it is not UTF-8) into a struct of `SINGLE` and `_corrupt`, for `problem`.

    Its decimals are of type VARIANT, which `fields` makes decimals of.
    """
    sealed = StructType([*_loose(schema).fields, StructField(_SEAL, BooleanType())])
    wrapper = StructType([StructField(SINGLE, ArrayType(sealed)), StructField(_CORRUPT, StringType())])
    options = {"columnNameOfCorruptRecord": _CORRUPT, "allowSingleQuotes": "false"}
    wrapped = F.concat(F.lit(f'{{"{SINGLE}":['), text, F.lit(f',{{"{_SEAL}":true}}]}}'))
    return F.from_json(wrapped, wrapper, options)


def fields(wrapped: str, schema: StructType) -> dict[str, str]:
    """Return SQL expressions of the fields of a value without a problem, from SQL of its `parsed`."""
    element = f"get({wrapped}.{SINGLE}, 0)"
    return {field.name: _exact(field.dataType, f"{element}.{sql_name(field.name)}", 0) for field in schema.fields}


def problem(value: str, text: str, wrapped: str, schema: StructType) -> str:
    """Return a SQL expression of the reason of a misfit, or NULL, from SQL of a value's bytes, text and `parsed`."""
    element, seal = (f"get({wrapped}.{SINGLE}, {place})" for place in (0, 1))
    misfits = [
        f"CASE WHEN get_json_object({text}, {_path(field.name)}) IS NOT NULL "
        f"AND {element}.{sql_name(field.name)} IS NULL "
        f"THEN '{sql_text(field.name)} is no {sql_text(field.dataType.simpleString().upper())}' END"
        for field in schema.fields
    ]
    decimals = [
        f"CASE WHEN {condition} THEN '{sql_text(path)} is no {kind}' END"
        for path, kind, condition in _no_decimals(schema, element, text, "", 0)
    ]
    # CASE is lazy: both lists are evaluated only for misfits.
    return f"""CASE
        WHEN {value} IS NULL THEN NULL
        WHEN {text} IS NULL THEN 'the value is not UTF-8 text'
        WHEN {wrapped} IS NULL OR {wrapped}.{_CORRUPT} IS NOT NULL THEN
            CASE WHEN try_parse_json({text}) IS NULL THEN 'the value is not JSON'
                 WHEN {text} NOT LIKE '%{{%' OR ltrim({text}) NOT LIKE '{{%' THEN 'the value is not a JSON object'
                 ELSE concat('the value does not fit the schema: ',
                             coalesce(nullif({_joined(misfits)}, ''), 'a field within a field, or text behind it')) END
        WHEN size({wrapped}.{SINGLE}) != 2 OR {element} IS NULL OR {seal}.{_SEAL} IS NULL THEN
            'the value is not one JSON object'
        {_when("the value does not fit the schema: ", decimals)}
        {unmet(element, _loose(schema))}
        END"""


def _has_decimals(kind: DataType) -> bool:
    return "decimal" in kind.simpleString()


def _loose(kind: Any) -> Any:
    """Return a type with VARIANT in the place of each decimal."""
    if isinstance(kind, DecimalType):
        return VariantType()
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _loose(field.dataType), field.nullable) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_loose(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _loose(kind.valueType), kind.valueContainsNull)
    return kind


def _exact(kind: DataType, value: str, depth: int) -> str:
    """Return SQL of a value as its declared type, from SQL of it as the type of `_loose`."""
    variable = f"v{depth}"
    if not _has_decimals(kind):
        return value
    if isinstance(kind, StructType):
        pairs = (
            f"'{sql_text(field.name)}', {_exact(field.dataType, f'{value}.{sql_name(field.name)}', depth)}"
            for field in kind.fields
        )
        return f"IF({value} IS NULL, NULL, named_struct({', '.join(pairs)}))"
    if isinstance(kind, ArrayType):
        return f"transform({value}, {variable} -> {_exact(kind.elementType, variable, depth + 1)})"
    if isinstance(kind, MapType):
        return f"transform_values({value}, (k{depth}, {variable}) -> {_exact(kind.valueType, variable, depth + 1)})"
    text = _decimal_text(value)
    return f"IF(octet_length({text}) <= {_LONGEST_DECIMAL}, try_cast({text} AS {kind.simpleString()}), NULL)"


def _decimal_text(value: str) -> str:
    return f"try_variant_get({value}, '$', 'STRING')"


def _no_decimals(kind: DataType, value: str, text: str, path: str, depth: int) -> list[tuple[str, str, str]]:
    """Return path and type of each decimal of a `_loose` value, and the condition under which one there is none."""
    variable = f"v{depth}"
    if not _has_decimals(kind):
        return []
    if isinstance(kind, StructType):
        return [
            found
            for field in kind.fields
            for found in _no_decimals(
                field.dataType,
                f"{value}.{sql_name(field.name)}",
                text,
                f"{path}.{field.name}" if path else field.name,
                depth,
            )
        ]
    if isinstance(kind, ArrayType | MapType):
        element, values = _elements(kind, value)
        inner = _no_decimals(element, variable, text, f"{path}[]", depth + 1)
        return [(name, type_, f"exists({values}, {variable} -> {condition})") for name, type_, condition in inner]
    is_none = f"{_decimal_text(value)} IS NOT NULL AND {_exact(kind, value, depth)} IS NULL"
    is_rounded = f"schema_of_variant({value}) = 'DOUBLE' AND {text} RLIKE r'{_LONG_NUMBER}'"
    return [(path, kind.simpleString().upper(), f"({is_none} OR {is_rounded})")]


def unmet(value: str, schema: StructType) -> str:
    """Return the WHEN of a SQL expression of what a typed value lacks."""
    missing = [f"CASE WHEN {condition} THEN '{sql_text(path)}' END" for path, condition in _missing(schema, value, "")]
    return _when("a field that must be there is missing: ", missing)


def _when(words: str, cases: list[str]) -> str:
    return f"WHEN {_joined(cases)} != '' THEN concat('{words}', {_joined(cases)}) " if cases else ""


def _joined(cases: list[str]) -> str:
    return f"concat_ws(', ', {', '.join(cases)})"


def _missing(schema: StructType, value: str, path: str) -> list[tuple[str, str]]:
    """Return the path of each required field, and the condition under which it is missing."""
    found = []
    for field in schema.fields:
        here, name = f"{value}.{sql_name(field.name)}", f"{path}{field.name}"
        if not field.nullable:
            # JSON's null is a value of VARIANT.
            is_null = f" OR is_variant_null({here})" if isinstance(field.dataType, VariantType) else ""
            found.append((name, f"({here} IS NULL{is_null})"))
        found += [
            (inner, f"{here} IS NOT NULL AND {condition}") for inner, condition in _within(field.dataType, here, name)
        ]
    return found


def _within(kind: DataType, value: str, path: str) -> list[tuple[str, str]]:
    if isinstance(kind, StructType):
        return _missing(kind, value, f"{path}.")
    if isinstance(kind, ArrayType | MapType):
        variable = f"e{path.count('[')}"
        element, values = _elements(kind, value)
        inner = _within(element, variable, f"{path}[]")
        return [(name, f"exists({values}, {variable} -> {condition})") for name, condition in inner]
    return []


def _elements(kind: ArrayType | MapType, value: str) -> tuple[DataType, str]:
    """Return the type and the SQL of the items of an array, or of the values of a map."""
    return (kind.elementType, value) if isinstance(kind, ArrayType) else (kind.valueType, f"map_values({value})")


def sql_name(field: str) -> str:
    """Return a name as it stands in SQL, whatever its characters."""
    return "`" + field.replace("`", "``") + "`"


def _path(field: str) -> str:
    return "'$[\\'" + sql_text(field) + "\\']'"


def sql_text(text: str) -> str:
    """Return a text as it stands between the quotes of a SQL string."""
    return text.replace("\\", "\\\\").replace("'", "\\'")
