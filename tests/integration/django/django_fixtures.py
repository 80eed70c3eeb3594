"""Fixture that points Django's test databases at the devstack's Postgres. Import it in a module of Django tests."""

import pytest
from psycopg.conninfo import conninfo_to_dict


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix, postgres):  # noqa: ARG001
    """Fill in the server, in the very dicts that Django's connections hold; each process of tests has its databases."""
    from django.db import connections

    given = conninfo_to_dict(postgres.dsn)
    server = {
        "HOST": given["host"],
        "PORT": given["port"],
        "USER": given["user"],
        "PASSWORD": given.get("password", ""),
    }
    for alias in connections:
        connections.settings[alias].update(server)
