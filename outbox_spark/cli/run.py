"""One run of a pipeline: its file, a Spark session, progress in the log, signals, the exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox_core.cli.logs import configure_logging
from outbox_core.cli.signals import stop_on_signals
from outbox_core.errors import InvalidConfig, OutboxError
from outbox_spark.cli import EXIT_NOT_STARTED, fail
from outbox_spark.cli.progress import say, say_progress, use_one_line
from outbox_spark.config import PipelineFile, SparkSettings, load_pipeline
from outbox_spark.runtime.failures import reason_of
from outbox_spark.session import start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_ENDED_BY_ERROR = 1
_POLL_SECONDS = 0.2
_LOCAL = "local[*,4]"  # a failed task is tried four times, as on a cluster

_log = logging.getLogger("outbox_spark")


def main(options: argparse.Namespace) -> int:
    """Run the pipeline that the command line names; return the exit code. Raises OutboxError if it cannot begin."""
    file = load_pipeline(options.file, options.pipeline, os.environ)
    if options.pipeline == "replay" and options.publish:
        file.require_kafka()
    configure_logging(file.level)
    use_one_line()
    logging.getLogger("py4j").setLevel(logging.WARNING)
    try:
        spark = open_session(file.pipeline, file.spark)
    except (OutboxError, ImportError):
        raise
    except Exception as error:
        _log.debug("Spark did not start", exc_info=True)
        raise NotStarted(f"Spark did not start: {reason_of(error)}; see `outbox-spark doctor`") from None
    stop = threading.Event()
    # The exit code 1 of an audit means findings.
    ended = EXIT_NOT_STARTED if options.pipeline == "audit" else EXIT_ENDED_BY_ERROR
    try:
        with stop_on_signals(stop.set), _cancel_jobs_on(stop, spark, options.pipeline):
            return _PIPELINES[options.pipeline](spark, file, options, stop)
    except InvalidConfig as error:
        return fail(error, EXIT_NOT_STARTED)
    except OutboxError as error:
        return fail(error, ended)
    except Exception as error:
        _log.debug("ended by an error", exc_info=True)
        return fail(OutboxError(reason_of(error)), ended)
    finally:
        spark.stop()


class NotStarted(OutboxError):
    """A Spark that does not start."""


class Stopped(OutboxError):
    """A pipeline without batches that a signal has ended."""


@contextmanager
def _cancel_jobs_on(stop: threading.Event, spark: SparkSession, pipeline: str) -> Iterator[None]:
    """Cancel a pipeline that does not check `stop`; raise Stopped in place of the cancelled job's error."""
    if pipeline not in ("audit", "replay"):
        yield
        return
    over = threading.Event()

    def cancel() -> None:
        while not over.wait(_POLL_SECONDS):
            if stop.is_set():
                spark.interruptAll()

    watcher = threading.Thread(target=cancel, name="outbox-spark-cancel", daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        if stop.is_set():
            raise Stopped(f"{pipeline} was stopped by a signal before it had ended; start it again") from None
        raise
    finally:
        over.set()
        watcher.join()


def open_session(name: str, spark: SparkSettings) -> SparkSession:
    """Start Spark by the file's settings; under `spark-submit`, by its own."""
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    master = spark.master or (None if is_submitted else _LOCAL)
    settings = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "16"} | spark.settings
    return start_session(f"outbox-spark {name}", settings, master=master)


def _follow(spark: SparkSession, file: PipelineFile, options: argparse.Namespace, stop: threading.Event) -> int:
    from outbox_spark.pipelines import archive, project
    from outbox_spark.pipelines.follower import Follower
    from outbox_spark.tables import Table

    pipeline: Any = {"archive": archive, "project": project}[file.pipeline]
    targets = pipeline.targets(spark, file.settings)
    if options.maintain:
        for table in (target.table for target in targets if isinstance(target.table, Table)):
            say(f"{table.name}: merged {{:,}} files, deleted {{:,}}".format(*table.maintain()))
        return 0
    counts = Follower(spark, file.kafka, file.settings, targets, say_progress).run(once=options.once, stop=stop)
    say("; ".join(f"{count:,} {name}" for name, count in counts.items()) or "nothing was new")
    return 0


def _replay(spark: SparkSession, file: PipelineFile, options: argparse.Namespace, _: threading.Event) -> int:
    from outbox_spark.pipelines import replay

    counts = replay.run(spark, file.kafka, file.settings, publish=options.publish, say=say)
    if options.publish:
        say(f"published {counts['published']:,} records; {counts['skipped']:,} were published before")
    else:
        say(f"a dry run: {counts['selected']:,} records selected, nothing published; --publish does it")
    return 0


def _audit(spark: SparkSession, file: PipelineFile, _: argparse.Namespace, __: threading.Event) -> int:
    from outbox_spark.pipelines import audit, audit_report

    result = audit.run(spark, file.kafka, file.settings)
    text = audit_report.to_json(result)
    if file.settings.report is None:
        sys.stdout.write(text)
    else:
        audit_report.write(file.settings.report, text)
    if file.settings.html is not None:
        audit_report.write(file.settings.html, audit_report.to_html(result))
    counts = ", ".join(f"{result.total(kind):,} {kind}" for kind in audit.KINDS)
    say(f"{'clean' if result.is_clean else 'not clean'}: {result.total('expected'):,} expected; {counts}")
    return 0 if result.is_clean else 1


def _relay(spark: SparkSession, file: PipelineFile, options: argparse.Namespace, stop: threading.Event) -> int:
    from outbox_spark.pipelines.relay import RelayConfig, run_relay

    config = RelayConfig(harvest=file.harvest, **dict(file.settings))  # type: ignore[arg-type]  # it is there
    run_relay(spark, config, once=options.once, on_progress=say_progress, stopping=stop)
    return 0


_PIPELINES = {"project": _follow, "archive": _follow, "replay": _replay, "audit": _audit, "relay": _relay}
