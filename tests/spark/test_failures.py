"""Errors of workers, reported in one line."""

from outbox_spark.runtime.failures import reason_of

_SPARK_SAYS = """Job aborted due to stage failure: Task 0 failed: org.apache.spark.api.python.PythonException:
Traceback (most recent call last):
  File "worker.py", line 1, in main
    process()
psycopg.errors.UniqueViolation: duplicate key, password=hunter2

\tat org.apache.spark.api.python.BasePythonRunner.run(PythonRunner.scala:1)
"""


def test_tells_the_workers_error():
    """An error of a worker is reported by the last line of its traceback, without secrets."""
    assert reason_of(RuntimeError(_SPARK_SAYS)) == "psycopg.errors.UniqueViolation: duplicate key, password=***"


def test_tells_what_happened_in_the_jvm():
    """An error of Java is reported by its exception, not by the call."""
    called = "An error occurred while calling None.JavaSparkContext.\n: java.lang.OutOfMemoryError: heap\n\tat a.B(C)"
    assert reason_of(RuntimeError(called)) == "java.lang.OutOfMemoryError: heap"


def test_tells_the_first_line_of_others():
    """Any other error is reported by its first line, one without words by its name."""
    assert reason_of(RuntimeError("\nfirst\nsecond")) == "first"
    assert reason_of(RuntimeError()) == "RuntimeError"
