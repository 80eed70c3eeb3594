"""The adapter of the contracts for synchronous sessions and connections of SQLAlchemy."""

from contextlib import contextmanager


class SyncSessions:
    """Sessions of one engine.

    Args:
        engine: of the contract's database.
        make_session: makes a session or connection of an engine.
        wrap: makes of a session what the contract calls.
    """

    def __init__(self, engine, make_session, wrap):
        self._engine = engine
        self._make_session = make_session
        self._wrap = wrap

    def transaction(self):
        return self._open(self._engine, commit=True)

    def autocommit(self):
        return self._open(self._engine.execution_options(isolation_level="AUTOCOMMIT"), commit=False)

    @contextmanager
    def _open(self, engine, *, commit):
        session = self._make_session(engine)
        try:
            yield self._wrap(session)
            if commit:
                session.commit()
        finally:
            session.close()
