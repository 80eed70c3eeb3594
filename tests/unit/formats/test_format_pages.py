"""The code of the pages on formats, claim checks and tracing runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.schema_registry import registry

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["formats", "claim-checks", "tracing"])
def test_code_of_a_page(page, tmp_path):
    """All Python blocks of a page run, one after the other, in a fresh process."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    with registry() as running:
        variables = {**os.environ, "SCHEMA_REGISTRY_URL": running.url}
        command = [sys.executable, "-c", "\n".join(blocks)]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=240
        )
    assert done.returncode == 0, done.stderr
