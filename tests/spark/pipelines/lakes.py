"""Lakehouse tables of tests: where they are, and what other programs read in them."""

import duckdb
import polars as pl
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

FORMATS = ("delta", "iceberg")


def place_of(kind, folder):
    """Return the settings of a table of one format below a folder."""
    if kind == "delta":
        return {"path": str(folder / "archive")}
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    return {"iceberg": {"table": "shop.archive", "catalog": catalog}}


def address_of(place):
    """Return the same table as `replay` and `audit` name it."""
    return place.get("path") or place["iceberg"]


def by_polars(place, table=None):
    """Return all rows of a table that Polars reads."""
    if "path" in place:
        return pl.scan_delta(table or place["path"]).collect()
    return pl.scan_iceberg(iceberg(place, table)).collect()


def by_duckdb(place, query, table=None):
    """Return the rows of a query over `found`, the table as Arrow, by DuckDB."""
    connection = duckdb.connect()
    if "path" in place:
        connection.register("found", DeltaTable(table or place["path"]).to_pyarrow_dataset())
    else:
        iceberg(place, table).scan().to_duckdb("found", connection)
    return connection.execute(query).fetchall()


def iceberg(place, table=None):
    """Load an Iceberg table, as a program that knows only its catalog."""
    return load_catalog("default", **place["iceberg"]["catalog"]).load_table(table or place["iceberg"]["table"])
