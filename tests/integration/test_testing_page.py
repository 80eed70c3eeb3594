"""The page on testing: its examples, run as a project's own tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from outbox_core.schema import TableName, create_inbox_sql, create_table_sql

PAGE = Path(__file__).parents[2] / "docs" / "how-to-testing.md"
BLOCK = re.compile(r"^```python\n# (test_\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = """
SECRET_KEY = "only for tests"
INSTALLED_APPS = ["outbox_django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
SILENCED_SYSTEM_CHECKS = ["outbox_django.E005"]
"""


@pytest.fixture
def project(tmp_path):
    """Return a folder with the page's examples as files, and the settings of a Django project on SQLite."""
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    assert len(blocks) == PAGE.read_text().count("```python")
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nDJANGO_SETTINGS_MODULE = settings\npythonpath = .\n")
    return tmp_path


def test_the_examples_pass(project, database):
    """Every example passes, on SQLite or on PostgreSQL as it says, by the plugin that pytest finds by itself."""
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
        connection.execute(create_inbox_sql(TableName("inbox")))
    environment = os.environ | {"OUTBOX_POSTGRES_DSN": database}
    for name in ("DJANGO_SETTINGS_MODULE", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^1\d passed", ran.stdout, re.MULTILINE), ran.stdout
