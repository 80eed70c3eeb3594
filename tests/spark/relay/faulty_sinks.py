"""Relay sinks that fail: a task at a step, or the whole driver at the end of a batch. Imported by Spark's workers."""

import os
import signal
import tempfile
from pathlib import Path

from outbox_spark.relay.sink import KafkaSink, ShardsWriter

DIE_AT = "OUTBOX_TEST_DIE_AT"
GROUP = "OUTBOX_TEST_GROUP"


class FailingSink(KafkaSink):
    """A sink whose tasks fail once at each step for which there is a file, named after it, beside the outbox's name."""

    def streamWriter(self, schema, overwrite):  # noqa: N802, ARG002
        return _FailingWriter(self.options)


def flag_of(table, step):
    """Return the file that makes a task of this outbox fail at a step, and that the failing task removes."""
    return Path(tempfile.gettempdir()) / f"outbox-test-{table}-{step}"


class _FailingWriter(ShardsWriter):
    def failpoint(self, step):
        flag = flag_of(self._config.outbox_table.strip('"'), step)
        if flag.exists():
            flag.unlink()
            raise RuntimeError(f"made to fail when {step}")


class DyingSink(KafkaSink):
    """A sink that kills the driver's process group when all tasks of a batch have committed, before Spark notes it."""

    def streamWriter(self, schema, overwrite):  # noqa: N802, ARG002
        return _DyingWriter(self.options)


class _DyingWriter(ShardsWriter):
    def commit(self, messages, batchId):  # noqa: N803, ARG002
        if os.environ.get(DIE_AT) == str(batchId):
            os.killpg(int(os.environ[GROUP]), signal.SIGKILL)
