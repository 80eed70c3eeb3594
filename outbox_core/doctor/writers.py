"""The transactions that hold back the settled floor: they have written to the outbox, and are open."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from outbox_core.doctor.session import DatabaseSession
from outbox_core.stores.interface import OpenWriter
from outbox_core.stores.postgres import statements as sql

# As the harvester finds them: whoever has drawn an id has this lock until the rows are visible or gone.
_WRITERS = """
SELECT DISTINCT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = to_regclass(%(name)s) AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@dataclass(frozen=True, slots=True)
class Writer:
    """An open writer, with what ends it; ages in seconds."""

    transaction: str
    who: str
    pid: int | None
    state: str
    age_seconds: float
    remedy: str


@dataclass(frozen=True, slots=True)
class Writers:
    """The open writers, the oldest first, and the last id drawn; None where it may not be read, for the reason why."""

    last_id: int | None
    unusable: str
    writers: tuple[Writer, ...]

    def as_json(self) -> dict[str, Any]:
        """Return them as JSON can have them."""
        last_id = None if self.last_id is None else str(self.last_id)
        return {"last_id": last_id, "unusable": self.unusable, "writers": [asdict(one) for one in self.writers]}


def read_writers(session: DatabaseSession) -> Writers:
    """Read the open writers. The errors are those of `DatabaseSession.ask`."""
    name = session.table.quoted
    last_id, unusable = _last_id(session, name)
    names = [str(row[0]) for row in session.ask(_WRITERS, {"name": name})]
    described = [OpenWriter(*row) for row in session.ask(sql.DESCRIBE_WRITERS, {"name": name, "writers": names})]
    oldest_first = sorted(described, key=lambda writer: -writer.age_seconds)
    return Writers(last_id, unusable, tuple(_writer(writer) for writer in oldest_first))


_PLAIN_GID = re.compile(r"[\w .:-]+", re.ASCII)


def _last_id(session: DatabaseSession, name: str) -> tuple[int | None, str]:
    found = session.ask(sql.FIND_SEQUENCE, {"name": name})
    if len(found) != 1 or not found[0][1]:
        return None, f"the ids of {session.table} are not simply drawn from one sequence"
    sequence, _, may_read, _ = found[0]
    if not may_read:
        return None, f"GRANT SELECT ON SEQUENCE {sequence} TO {session.role}"
    statement = sql.LAST_ID_DRAWN.format(sequence=sequence.replace("%", "%%"))
    ((last_id, *_),) = session.ask(statement, {"name": name, "sequence": sequence})
    return last_id, ""


def _writer(writer: OpenWriter) -> Writer:
    if writer.pid is None:
        gid = writer.gid or ""
        who = f"prepared transaction {gid!r}"
        # Whoever may INSERT chooses the name, which an operator is to copy: only a plain one is shown as a command.
        is_plain = _PLAIN_GID.fullmatch(gid) is not None
        remedy = f"ROLLBACK PREPARED '{gid}'" if is_plain else "SELECT gid, owner, prepared FROM pg_prepared_xacts"
    else:
        who = f"pid {writer.pid}{f' ({writer.application})' if writer.application else ''}"
        remedy = f"SELECT pg_terminate_backend({writer.pid})"
    return Writer(writer.name, who, writer.pid, writer.state, round(writer.age_seconds, 3), remedy)
