"""Marks that at-least-once leaders left in the table; exactly-once delivery holds their rows before it begins."""

from __future__ import annotations

from outbox_core.stores.interface import MARKED, MarkedRows, NewHold
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.conversion import array, key_as_held
from outbox_core.stores.postgres.holds import PostgresHolds
from outbox_core.stores.postgres.table import OutboxTable

_ERROR = (
    "its column leader_id was set: an at-least-once leader that did not stop in good order may have sent it, or its "
    "writer set it. Release it to publish it, perhaps again, or skip it; --accept-marked releases all of these"
)


class PostgresMarks:
    """The marks of an outbox; implements `outbox_core.stores.interface.MarkStore`."""

    def __init__(self, table: OutboxTable, holds: PostgresHolds) -> None:
        self._table = table
        self._holds = holds

    def count(self) -> MarkedRows:
        """Count the rows that carry a harvester's mark."""
        with self._table.without_timeout():
            is_any = self._table.query(sql.ANY_IS_MARKED)[0][0]
            return MarkedRows(*self._table.query(sql.COUNT_MARKED)[0] if is_any else (0, 0, 0))

    def hold(self, limit: int) -> int:
        """Hold some of the rows that carry a harvester's mark, and clear their marks; return how many."""
        table = self._table
        with table.without_timeout():
            rules, of_outbox = table.rules(), {"outbox": table.layout().outbox}
            found = table.query(sql.FIND_MARKED, of_outbox | {"limit": limit}, broken=rules.broken)
            if found:
                self._holds.add([_hold(*row) for row in found])
                ids = array([identity for identity, *_ in found])
                table.execute(sql.CLEAR_MARKS_OF, {"ids": ids}, fulfilled=rules.fulfilled)
            else:  # rows that were held before for another reason
                table.execute(sql.CLEAR_MARKS_OF_HELD, of_outbox, fulfilled=rules.fulfilled)
        return len(found)

    def release_held(self) -> int:
        """Release the rows that `hold` held; return how many."""
        return self._holds.release_for(MARKED)

    def clear(self) -> int:
        """Clear all marks, relays' too, but for those that a constraint keeps; return how many."""
        with self._table.without_timeout():
            return self._table.execute(sql.CLEAR_MARKS, fulfilled=self._table.rules().fulfilled)


def _hold(identity: int, topic: str, key: str | None, broken: str) -> NewHold:
    kept = f". The mark stays, as the row violates {broken}" if broken else ""
    return NewHold(topic, key_as_held(key), identity, MARKED, f"{_ERROR}{kept}")
