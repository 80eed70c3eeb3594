"""Fixtures that point Django at the devstack's Postgres. Import them in a module of Django tests."""

import pytest
from django.db import connections
from psycopg.conninfo import conninfo_to_dict


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix, postgres):  # noqa: ARG001
    """Fill in the server, in the very dicts that Django's connections hold; each process of tests has its databases."""
    given = conninfo_to_dict(postgres.dsn)
    server = {
        "HOST": given["host"],
        "PORT": given["port"],
        "USER": given["user"],
        "PASSWORD": given.get("password", ""),
    }
    for alias in connections:
        connections.settings[alias].update(server)


@pytest.fixture
def alias(database, django_db_blocker, monkeypatch):
    """An alias of Django for the test's database."""
    server = conninfo_to_dict(database)
    names = {"NAME": "dbname", "HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
    settings = {**connections.settings["default"], **{key: server.get(name, "") for key, name in names.items()}}
    monkeypatch.setitem(connections.settings, "contract", settings)
    with django_db_blocker.unblock():
        yield "contract"
        connections["contract"].close()
        del connections["contract"]
