"""Checks of what an outbox keeps: its history, which is optional, and its archive, if published rows shall go there."""

from __future__ import annotations

from collections.abc import Iterator

from outbox_core.doctor.findings import Commands, Finding, fine, problem, warning
from outbox_core.doctor.session import DatabaseSession
from outbox_core.schema import TableName, archive_beside, archive_rotation, events_beside, statistics_beside

_HISTORY = """
SELECT to_regclass(%(table)s) IS NOT NULL,
       has_table_privilege(to_regclass(%(table)s)::oid, 'INSERT')
           AND has_table_privilege(to_regclass(%(table)s)::oid, 'SELECT')
           AND has_table_privilege(to_regclass(%(table)s)::oid, 'DELETE'),
       coalesce(row_security_active(to_regclass(%(table)s)::oid), false)
"""

# Logical replication copies rows, and not the sequences that their ids come from.
_SEQUENCE = """
SELECT sequence, (SELECT max(id) FROM {table}), coalesce(pg_sequence_last_value(to_regclass(sequence)), 0)
FROM pg_get_serial_sequence(%(table)s, 'id') AS sequence
WHERE has_table_privilege(%(table)s, 'SELECT') AND has_sequence_privilege(sequence, 'SELECT, USAGE')
"""

_ARCHIVE = """
SELECT to_regclass(%(archive)s) IS NOT NULL,
       has_table_privilege(to_regclass(%(archive)s)::oid, 'INSERT')
           AND has_function_privilege(to_regprocedure(%(rotate)s)::oid, 'EXECUTE')
"""


class RetentionChecks:
    """The checks of history and archive. The errors are those of `DatabaseSession.ask`."""

    def __init__(self, session: DatabaseSession, commands: Commands) -> None:
        self._session = session
        self._commands = commands

    def history(self, *, only_reads: bool) -> Iterator[Finding]:
        """Check the two tables of the history; a role that only reads need not write them."""
        role, missing, forbidden, secured = self._session.role, [], [], []
        behind: list[Finding] = []
        for table in (statistics_beside(self._session.table), events_beside(self._session.table)):
            ((is_there, may_write, is_secured),) = self._session.ask(_HISTORY, {"table": table.quoted})
            if not is_there:
                missing.append(table)
            elif not may_write and not only_reads:
                forbidden.append(table)
            elif is_secured:
                secured.append(table)
            else:
                behind.extend(self._behind(table))
        yield from behind
        if missing:
            named = " and ".join(map(str, missing))
            made = self._commands.make_tables()
            yield fine("history", f"no table {named}: what happened is not kept; {made} makes it")
        if forbidden:
            named = ", ".join(table.quoted for table in forbidden)
            yield warning(
                "history",
                f"role {role} may not write {', '.join(map(str, forbidden))}: what happens is not kept",
                f"GRANT SELECT, INSERT, DELETE ON {named} TO {role}",
            )
        for table in secured:
            yield warning(
                "history",
                f"table {table} has row level security that counts for role {role}: what happens is not kept there",
                f"ALTER TABLE {table.quoted} DISABLE ROW LEVEL SECURITY",
            )
        if not missing and not forbidden and not secured and not behind:
            yield fine("history", "statistics and events are kept")

    def _behind(self, table: TableName) -> Iterator[Finding]:
        statement = _SEQUENCE.format(table=table.quoted.replace("%", "%%"))
        for sequence, last_id, drawn in self._session.ask(statement, {"table": table.quoted}):
            if last_id is not None and last_id > drawn:
                yield warning(
                    "history",
                    f"there is an id {last_id} in {table}, and its sequence has come to {drawn} only: what happens is "
                    "not kept until it has caught up",
                    f"SELECT setval('{sequence}', {last_id})",
                )

    def archive(self, *, only_reads: bool) -> Iterator[Finding]:
        """Check the archive, without which a harvester with `retention: archive` does not start."""
        archive, rotate = archive_beside(self._session.table), archive_rotation(self._session.table)
        names = {"archive": archive.quoted, "rotate": f"{rotate.quoted}(integer)"}
        ((is_there, may_archive),) = self._session.ask(_ARCHIVE, names)
        if not is_there:
            yield problem(
                "archive",
                f"there is no table {archive}, and with `retention: archive` the harvester does not start without it",
                f"run what `outbox schema --archive --table {self._session.table}` prints, or in Django a migration "
                "with the operation `ArchivePublished()`",
            )
        elif not may_archive and not only_reads:
            role = self._session.role
            yield problem(
                "archive",
                f"role {role} may not use {archive}",
                f"GRANT SELECT, INSERT ON TABLE {archive.quoted} TO {role}; "
                f"GRANT EXECUTE ON FUNCTION {rotate.quoted}(integer) TO {role}",
            )
        else:
            yield fine("archive", f"{archive}")
