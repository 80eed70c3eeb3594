"""The command `outbox-spark`: a pipeline by its name and a YAML file, `doctor` and `pack`.

Exit codes: 0 for success (an audit: clean), 1 for a pipeline that an error ended and for findings of `audit` or
`doctor`, 2 for errors before the work began, 130 for Ctrl-C there. Each failure is one line on stderr, beginning with
`outbox-spark: error:`. A first SIGTERM or SIGINT stops between two batches, or cancels `audit` and `replay`, which have
none; a second one ends the process at once. Importing this package imports no PySpark.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from outbox_core import __version__
from outbox_core.errors import MissingExtra, OutboxError
from outbox_core.printable import printable

__all__ = ["main"]

EXIT_NOT_STARTED = 2
_EXIT_INTERRUPTED = 130

_HELP = {
    "project": "topics -> a typed, deduplicated table in PostgreSQL, Delta or Iceberg",
    "archive": "topics -> a Delta or Iceberg table by event date",
    "replay": "archive -> topics; a dry run, unless --publish is given",
    "audit": "archive, or stashed records, against topics: lost, repeated, reordered",
    "relay": "outbox table -> topics, for backlogs that outgrow one harvester",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = build_parser().parse_args(argv)
    try:
        if options.pipeline == "doctor":
            from outbox_spark.cli import doctor

            return doctor.main(options.file)
        if options.pipeline == "pack":
            from outbox_spark.cli import pack

            return pack.main(options.output)
        from outbox_spark.cli import run

        return run.main(options)
    except ImportError as error:
        if (error.name or "").startswith("outbox_"):
            raise
        missing = MissingExtra(
            f"needs {error.name or error}, which is not installed; pip install 'kafka-outbox[spark]'"
        )
        return fail(missing, EXIT_NOT_STARTED)
    except OutboxError as error:
        return fail(error, EXIT_NOT_STARTED)
    except KeyboardInterrupt:  # before the pipeline takes signals, or in `doctor` and `pack`
        return fail(OutboxError("interrupted"), _EXIT_INTERRUPTED)


def fail(error: Exception, code: int) -> int:
    """Write an error to stderr in one line, without secrets; return the exit code."""
    try:
        from outbox_core.config import redact
    except ImportError:  # pydantic itself is missing: the message is our own
        text = str(error)
    else:
        text = redact(str(error)) or type(error).__name__
    sys.stderr.write(f"outbox-spark: error: {printable(' '.join(text.split()))}\n")
    return code


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, with a subcommand for each pipeline."""
    parser = argparse.ArgumentParser(prog="outbox-spark", description="Pipelines on Apache Spark for Kafka topics.")
    parser.add_argument("--version", action="version", version=f"kafka-outbox {__version__}")
    pipelines = parser.add_subparsers(title="pipelines", dest="pipeline", metavar="NAME", required=True)
    for name, words in _HELP.items():
        pipeline = pipelines.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        pipeline.add_argument(
            "-f", "--file", required=True, metavar="FILE", help="YAML file with a section of this name"
        )
        if name in ("project", "archive", "relay"):
            pipeline.add_argument("--once", action="store_true", help="end at the present end of the topics or table")
        if name in ("project", "archive"):
            pipeline.add_argument(
                "--maintain", action="store_true", help="merge small files, delete what no kept version needs, and end"
            )
        if name == "replay":
            pipeline.add_argument("--publish", action="store_true", help="publish; without it, only print the plan")
    doctor = pipelines.add_parser(
        "doctor", help="check whether pipelines can run here", description="Check whether pipelines can run here."
    )
    doctor.add_argument("-f", "--file", metavar="FILE", help="check also the services that this file names")
    words = "pack the Python packages that the workers of a cluster need"
    pack = pipelines.add_parser("pack", help=words, description=words[0].upper() + words[1:] + ".")
    pack.add_argument("-o", "--output", required=True, metavar="FILE", help="the archive, NAME.tar.gz")
    return parser
