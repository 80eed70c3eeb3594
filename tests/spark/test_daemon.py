"""The daemon that forks Spark's Python workers."""

import subprocess
import sys

_PROGRAM = """
import os
from outbox_spark.runtime import daemon
daemon.preload()
print(len(os.listdir("/proc/self/task")))
"""


def test_preloading_starts_no_thread():
    """A process that forks has no second thread, whose locks would stay taken in its children."""
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1"]
