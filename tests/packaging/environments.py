"""Virtual environments that see nothing of the checkout."""

import os
import subprocess
import sys
import venv
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
_OF_OURS = ("PYTHON", "OUTBOX_", "PYTEST_", "DJANGO_")  # variables that are about this process and its tests


class Environment:
    """A virtual environment; commands run in a folder of its own and see nothing of the checkout."""

    def __init__(self, path, *what):
        venv.create(path)  # without a pip of its own, which takes longer to install than all else
        self.folder = path / "elsewhere"
        self.folder.mkdir()
        self._bin = path / "bin"
        self.pip("install", "--quiet", "--no-compile", *what)

    def pip(self, *arguments):
        """Run our pip for this environment, and return its output."""
        command = [sys.executable, "-m", "pip", "--python", self._bin / "python", "--disable-pip-version-check"]
        return subprocess.run(
            [*command, *arguments], cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def run(self, program, *arguments, check=False, folder=None, **variables):
        """Run a program of this environment with more variables, in its own folder or another one."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OURS)}
        done = subprocess.run(
            [self._bin / program, *arguments],
            cwd=folder or self.folder,
            env=kept | variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def python(self, code, **variables):
        """Run code, and return its output."""
        return self.run("python", "-c", code, check=True, **variables).stdout
