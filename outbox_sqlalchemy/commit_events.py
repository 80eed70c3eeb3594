"""The signal to the harvesters of this process, once a session has committed its records.

A connection's event comes before its commit, so polling or NOTIFY finds records that were stashed on a bare connection.
"""

from __future__ import annotations

from sqlalchemy import event
from sqlalchemy.orm import Session

from outbox_core import commit_signal

_STASHED = "kafka_outbox_stashed"


def notify_after_commit(session: Session) -> None:
    """Notify the harvesters of this process once the session's transaction is committed."""
    if not commit_signal.has_subscribers():
        return
    session.info[_STASHED] = True
    if not event.contains(session, "after_commit", _committed):
        event.listen(session, "after_commit", _committed)


def _committed(session: Session) -> None:
    """Notify, unless this is a savepoint: SQLAlchemy calls it for those too, where nothing is committed yet."""
    if not session.in_nested_transaction() and session.info.pop(_STASHED, False):
        commit_signal.notify()
