"""SQLAlchemy's URLs, from the DSNs of the rest of the library."""

from __future__ import annotations

from sqlalchemy import URL
from sqlalchemy.engine import make_url

from outbox_core.errors import InvalidConfig, MissingExtra

_DRIVER = "postgresql+psycopg"


def sqlalchemy_url(dsn: str) -> URL:
    """Return the URL of a PostgreSQL database for `create_engine` and, with the same driver, `create_async_engine`.

    Args:
        dsn: as for libpq, `postgresql://user@host/db` or `host=/run/postgresql dbname=db`; or an SQLAlchemy URL that
            names a driver (`postgresql+asyncpg://...`), which is kept as it is.

    Raises:
        InvalidConfig: if it is neither. The DSN, which may hold a password, is not shown.
        MissingExtra: if psycopg 3 is not installed.
    """
    scheme, separator, _ = dsn.partition("://")
    if separator and "+" in scheme:
        return make_url(dsn)
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise MissingExtra("psycopg 3 is needed to connect to PostgreSQL: pip install 'psycopg[binary]'") from error
    try:
        given = {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    except ProgrammingError:
        raise InvalidConfig("the DSN is neither postgresql://... nor key=value pairs as libpq takes them") from None
    username, password, database = (given.pop(key, None) for key in ("user", "password", "dbname"))
    host, port = given.get("host"), given.get("port")
    if host and not host.startswith("/") and "," not in host:
        # Anything else (a socket's folder, several hosts) stays in the query, where psycopg's dialect takes it.
        given.pop("host")
        given.pop("port", None)
        return URL.create(_DRIVER, username, password, host, int(port) if port else None, database, given)
    return URL.create(_DRIVER, username, password, None, None, database, given)
