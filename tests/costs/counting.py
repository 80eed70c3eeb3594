"""Counts of what a harvester does: its calls, its statements, and what the server counts."""

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg

_ROOT = Path(__file__).parents[2]
_GENERATED = "<string>"  # where named tuples and dataclasses have their constructors
_INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # no calls from Python 3.12 on
_SHOWN_OF_STATEMENT = 60


class CallCounter:
    """Calls of the product's functions, and of the Kafka client's `produce`."""

    def __init__(self):
        self._of_threads = []

    @contextmanager
    def counting(self):
        """Count the calls of all threads that start within the context."""
        threading.setprofile(self._start)
        try:
            yield
        finally:
            threading.setprofile(None)

    def _start(self, *_):
        """Replace this function, in a thread that begins, by one with counts of its own: threads share no counter."""
        counts = Counter()
        self._of_threads.append(counts)

        def note(frame, event, called):
            if event == "call":
                counts[frame.f_code] += 1
            elif event == "c_call" and called.__name__ == "produce":
                counts["produce"] += 1

        sys.setprofile(note)

    @property
    def produce_calls(self):
        """The calls of `produce`."""
        return sum(counts["produce"] for counts in self._of_threads)

    def by_function(self):
        """Return the calls of each function of the product, by `path:name`."""
        calls = Counter()
        for counts in self._of_threads:
            for code, count in counts.items():
                if code != "produce" and code.co_name not in _INLINED and (path := _path_in_product(code)):
                    calls[f"{path}:{code.co_qualname}"] += count
        return calls


def _path_in_product(code):
    if code.co_filename == _GENERATED:
        return "generated"
    path = Path(code.co_filename)
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT / "outbox_core") else ""


@contextmanager
def counted_statements(monkeypatch, name):
    """Count the statements that have this name in them, by their beginnings: others are repeated by the clock."""
    statements = Counter()
    execute = psycopg.Cursor.execute

    def counting(self, query, *arguments, **options):
        text = query.decode() if isinstance(query, bytes) else str(query)
        if name in text and threading.current_thread().name.startswith("outbox-"):
            statements[" ".join(text.split())[:_SHOWN_OF_STATEMENT]] += 1
        return execute(self, query, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", counting)
        yield statements


class Rows(NamedTuple):
    """Rows that were read from the table or its indexes, dead ones too, and versions of rows that have died."""

    read: int
    dead: int


class ServerCounters:
    """The server's counters of a new table and of its WAL, from the making of this object on.

    Exact on a server that does nothing else, writes no full pages and has no autovacuum.
    """

    def __init__(self, connection, table):
        self._connection = connection
        self._table = table
        self._wal_began = self._ask("SELECT pg_current_wal_insert_lsn()")[0]
        self._rows_began = self._rows()

    def _ask(self, query, *parameters):
        return self._connection.execute(query, parameters).fetchone()

    def wal_bytes(self):
        """Return the bytes of WAL."""
        query = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)::bigint"
        return self._ask(query, self._wal_began)[0]

    def rows(self):
        """Return what happened to rows; what sessions did is complete when they have ended."""
        return Rows(*(now - began for now, began in zip(self._rows(), self._rows_began, strict=True)))

    def _rows(self):
        return self._ask(
            "SELECT seq_tup_read + (SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relid = t.relid),"
            " n_tup_upd + n_tup_del FROM pg_stat_user_tables AS t WHERE relid = %s::regclass",
            self._table,
        )
