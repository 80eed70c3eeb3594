"""`outbox harvest`, shared with Django's `run_harvester`; importing it needs only the base install."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from outbox_core.cli.gc_tuning import tune_gc
from outbox_core.cli.logs import add_log_format_argument, configure_logging
from outbox_core.cli.signals import stop_on_signals
from outbox_core.errors import InvalidConfig, InvariantBroken, MissingExtra, OutboxError
from outbox_core.events import Event, LeaderRefreshed, MeterRead
from outbox_core.printable import plural, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_core.config import HarvestConfig
    from outbox_core.harvest.harvester import Harvester
    from outbox_core.metrics import HarvestMetrics

EXIT_ENDED_BY_ERROR = 1
EXIT_NOT_STARTED = 2
_REFRESHED_EVERY_SECONDS = 60.0

_log = logging.getLogger(__name__)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `harvest` to the commands of `outbox`."""
    parser = commands.add_parser(
        "harvest",
        help="publish the records of an outbox table to Kafka",
        description="Publish the records of an outbox table to Kafka, in order, until stopped. "
        "Options win over environment variables (OUTBOX_...), those over the file.",
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="YAML file; goharvest's reaper.yaml is understood")
    parser.add_argument(
        "--log-level", metavar="LEVEL", help="debug, info (default), warn or error; environment: OUTBOX_LOG_LEVEL"
    )
    add_log_format_argument(parser, variables=True)
    add_harvest_arguments(parser, variables=True)
    parser.set_defaults(command=_harvest)


def add_harvest_arguments(parser: argparse.ArgumentParser, *, variables: bool = False) -> None:
    """Add the options of harvesting, with their environment variables where these count.

    Read the options with `overrides_from`.
    """
    add = _adder(parser, variables=variables)
    parser.add_argument("--drain", action="store_true", help="end with exit code 0 once the table is empty")
    add_source_arguments(parser, variables=variables)
    parser.add_argument(
        "--accept-marked",
        action="store_true",
        default=None,
        help="exactly once: publish rows that an at-least-once harvester left marked, which may repeat them",
    )
    parser.add_argument(
        "--accept-moved",
        action="store_true",
        default=None,
        help="exactly once: go on after pg_upgrade, or a move to another server, when nothing harvests the old one",
    )
    add(
        "--on-poison",
        choices=["hold", "dead-letter"],
        help="what becomes of a record that Kafka refuses for good; default: hold",
    )
    add("--dead-letter-topic", metavar="TOPIC", help="topic for such records")
    retention = "what becomes of published rows; default: delete"
    add("--retention", choices=["delete", "archive"], help=retention)
    add(
        "--notify",
        action="store_true",
        default=None,
        help="listen for the notices of the trigger that `outbox schema --notify` prints",
    )
    add("--name", help="name of this instance in logs")
    add("--metrics-port", type=int, metavar="PORT", help="serve /metrics and /healthz there; 0: any")
    add("--metrics-host", metavar="HOST", help="address for them; default: 127.0.0.1")


def add_source_arguments(parser: argparse.ArgumentParser, *, variables: bool = False) -> None:
    """Add the options that name the outbox and the Kafka cluster."""
    add = _adder(parser, variables=variables)
    add("--dsn", metavar="DSN", help="the database: key=value pairs or a postgresql:// URL")
    add("--bootstrap-servers", metavar="HOST:PORT,...", help="the Kafka cluster")
    add("--table", metavar="NAME", help="the outbox table, `table` or `schema.table`")
    add("--leader-topic", metavar="TOPIC", help="topic of the leader election")
    add("--leader-group-id", metavar="GROUP", help="group in which an outbox's harvesters compete")
    add("--delivery", metavar="MODE", help="at-least-once (default), or exactly-once through Kafka transactions")
    parser.add_argument(
        "-X",
        dest="kafka_properties",
        action="append",
        type=_property,
        metavar="PROPERTY=VALUE",
        help="any librdkafka property, for all clients; may be given several times"
        + ("; environment: OUTBOX_KAFKA_<PROPERTY>, _ for ." if variables else ""),
    )


_VARIABLES = {
    "--dsn": "OUTBOX_POSTGRES_DSN",
    "--table": "OUTBOX_TABLE",
    "--bootstrap-servers": "OUTBOX_KAFKA_BOOTSTRAP",
}


def variable_of(option: str) -> str:
    """Return the environment variable of an option, as `outbox_core.config.names` has it, without the extra."""
    return _VARIABLES.get(option) or f"OUTBOX_{option.removeprefix('--').replace('-', '_').upper()}"


def _adder(parser: argparse.ArgumentParser, *, variables: bool) -> Callable[..., None]:
    def add(option: str, *, help: str, **how: Any) -> None:  # noqa: A002  argparse's own name
        parser.add_argument(option, help=f"{help}; environment: {variable_of(option)}" if variables else help, **how)

    return add


def overrides_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options as fields of `HarvestConfig`, for the `overrides` of `load_config`."""
    from outbox_core.config.names import BOOTSTRAP_SERVERS, ON_COMMAND_LINE, option_name

    properties = dict(options.get("kafka_properties") or ())
    servers = options.get(option_name(BOOTSTRAP_SERVERS))
    if servers:
        properties[BOOTSTRAP_SERVERS[1]] = servers
    fields = {field: options.get(option_name((field,))) for field in ON_COMMAND_LINE}
    fields["base_kafka_config"] = properties or None
    return {name: value for name, value in fields.items() if value is not None}


def run(config: HarvestConfig, *, drain: bool = False, tell: Callable[[str], object] | None = None) -> int:
    """Harvest until a signal, an error, or, with `drain`, an empty table, and return the exit code.

    `tell` is given each line about an error; by default `fail` writes it.
    """
    tell = tell or fail
    try:
        harvester, metrics = _make_harvester(config, drain=drain)
        with ExitStack() as stack:
            _serve_metrics(config, harvester, metrics, stack)
            stack.enter_context(stop_on_signals(harvester.stop))
            stack.enter_context(tune_gc())
            _log_start(config)
            harvester.start()
            return _wait_for_end(harvester, tell)
    except OutboxError as error:
        for sentence in sentences(error):
            tell(sentence)
    return EXIT_NOT_STARTED


def fail_with(error: OutboxError) -> int:
    """Write a line for the error, or one for each mistake in settings, to stderr; return the exit code."""
    for sentence in sentences(error):
        fail(sentence)
    return EXIT_NOT_STARTED


def sentences(error: OutboxError) -> list[str]:
    """Return the error in lines of their own, without secrets: the mistakes in settings, or its one text."""
    if not isinstance(error, InvalidConfig):
        return [shown(error)]
    if error.shows_no_values:  # `password: put it in quotes` would look like one
        return list(error.mistakes)
    return [shown(InvalidConfig(mistake)) for mistake in error.mistakes] or [shown(error)]


def fail(message: str, code: int = EXIT_NOT_STARTED) -> int:
    """Write one line about an error to stderr, and return the exit code."""
    sys.stderr.write(f"outbox: error: {printable(' '.join(message.split()))}\n")
    return code


def shown(error: Exception) -> str:
    """Return the text of an error, without the secrets that a driver may have put into it."""
    try:
        from outbox_core.config import redact
    except ImportError:  # the base install; whatever it can fail of says nothing that was not checked
        return str(error)
    return redact(str(error)) or type(error).__name__


def _harvest(options: argparse.Namespace) -> int:
    try:
        from outbox_core.config import load_config, log_format, log_level, read_document
    except ImportError as error:
        raise missing_extra(error) from None
    document = read_document(options.file) if options.file is not None else None
    overrides = overrides_from(vars(options))
    try:
        level = log_level(document, environ=os.environ, override=options.log_level)
        configure_logging(level, log_format(document, environ=os.environ, override=options.log_format))
    except InvalidConfig as error:
        try:
            load_config(document, environ=os.environ, overrides=overrides)
        except InvalidConfig as others:
            raise InvalidConfig(*error.mistakes, *others.mistakes) from None
        raise
    return run(load_config(document, environ=os.environ, overrides=overrides), drain=options.drain)


def _make_harvester(config: HarvestConfig, *, drain: bool) -> tuple[Harvester, HarvestMetrics]:
    try:
        from outbox_core.harvest.harvester import Harvester
        from outbox_core.metrics import HarvestMetrics
    except ImportError as error:
        raise missing_extra(error) from None
    metrics = HarvestMetrics(outbox_name=config.outbox_name or "")
    return Harvester(config, _EventLog(), metrics=metrics, drain=drain), metrics


def _serve_metrics(config: HarvestConfig, harvester: Harvester, metrics: HarvestMetrics, stack: ExitStack) -> None:
    if config.metrics_port is None:
        return
    from outbox_core.metrics import MetricsServer

    server = MetricsServer(config.metrics_host, config.metrics_port, metrics.registry, harvester.health)
    stack.enter_context(server)
    _log.info("serving /metrics and /healthz on %s port %d", config.metrics_host, server.port)


def _wait_for_end(harvester: Harvester, tell: Callable[[str], object]) -> int:
    failure: Exception | None = None
    try:
        harvester.join()
    except Exception as error:
        if not isinstance(error, OutboxError) or isinstance(error, InvariantBroken):  # where it was, for a report
            _log.exception("the harvester was ended by an unexpected error")
        failure = error
    _log_end(harvester)
    if failure is None:
        return 0
    tell(shown(failure))
    return EXIT_ENDED_BY_ERROR


def _log_start(config: HarvestConfig) -> None:
    """Log what is harvested from where to where: until Kafka answers there may be nothing else for some seconds."""
    try:
        from outbox_core.stores.postgres.connection import location
    except ImportError as error:
        raise missing_extra(error) from None
    properties = config.base_kafka_config
    kafka = properties.get("bootstrap.servers") or properties.get("metadata.broker.list")
    parts = location(config.data_source), config.outbox_table, kafka, config.delivery
    _log.info("starting: %s, table %s, Kafka at %s, delivery %s", *parts)


def _log_end(harvester: Harvester) -> None:
    """Log what this process published in all: drained or stopped, the numbers of the log then add up."""
    totals = harvester.metrics.totals()
    lines = [f"published {plural(totals.published, 'record')} in all"]
    if totals.dead_letters:
        lines.append(f"{plural(totals.dead_letters, 'record')} to the dead-letter topic")
    if totals.failed:
        lines.append(f"{plural(totals.failed, 'attempt')} failed")
    if totals.holds:
        lines.append(f"{plural(totals.holds, 'hold')} left")
    _log.info("ended: %s", "; ".join(lines))


class _EventLog:
    """Log of what the election does not log itself.

    New leader IDs are told once a minute: while marks fail, as on a full disk, each retry has one.
    """

    def __init__(self) -> None:
        self._told_refreshed_at: float | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case LeaderRefreshed():
                now = time.monotonic()
                if self._told_refreshed_at is None or now - self._told_refreshed_at >= _REFRESHED_EVERY_SECONDS:
                    self._told_refreshed_at = now
                    _log.info("leading on, new leader ID %s: records are marked again", event.leader_id)
            case MeterRead(stats=stats):
                published = plural(stats.interval_count, "record")
                rates = _rate(stats.interval_rate), f"{stats.total_count:,}", _rate(stats.total_rate)
                _log.info("published %s, %s; %s in all, %s", published, *rates)


def _rate(per_second: float) -> str:
    """Write a rate so that a few records an hour are not 0/s."""
    if 0 < per_second < 0.1:
        return f"{per_second * 3600:.0f}/h" if per_second * 3600 >= 1 else "less than 1/h"
    return f"{per_second:.1f}/s" if per_second < 10 else f"{per_second:.0f}/s"


def _property(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        # Without the text itself: it may be a password.
        raise argparse.ArgumentTypeError("write PROPERTY=VALUE, for example security.protocol=ssl")
    return name.strip(), value


def missing_extra(error: ImportError) -> MissingExtra:
    """Return the error for a missing module of the extra, or re-raise it if the module is one of ours."""
    if (error.name or "").startswith("outbox_core"):
        raise error
    return MissingExtra(f"needs {error.name or error}, which is not installed; pip install 'kafka-outbox[harvester]'")
