"""Has harvesters in this process look at the outbox once a session has committed what it stashed there.

Only sessions know when their commit is done: SQLAlchemy tells of a connection's commit before it is sent. Records that
were stashed on a bare connection are found by the harvester's own looks, or by NOTIFY.
"""

from __future__ import annotations

from sqlalchemy import event
from sqlalchemy.orm import Session

from outbox_core import doorbell

_STASHED = "kafka_outbox_stashed"


def ring_after_commit(session: Session) -> None:
    """Ring the doorbell when the session's transaction has been committed, if anybody is there to hear it."""
    if not doorbell.is_heard():
        return
    session.info[_STASHED] = True
    if not event.contains(session, "after_commit", _committed):
        event.listen(session, "after_commit", _committed)


def _committed(session: Session) -> None:
    """SQLAlchemy tells of every savepoint too, where nothing is committed yet."""
    if not session.in_nested_transaction() and session.info.pop(_STASHED, False):
        doorbell.ring()
