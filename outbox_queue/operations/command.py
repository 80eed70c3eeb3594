"""`outbox queue tracker | stats | peek | dead-letters`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any

from outbox_core.cli.harvest import EXIT_ENDED_BY_ERROR, fail
from outbox_core.cli.hold import EXIT_NOT_CONFIRMED, asker
from outbox_core.cli.logs import add_log_format_argument, configure_logging
from outbox_core.cli.signals import stop_on_signals
from outbox_core.cli.terminal import aligned
from outbox_core.config import log_format, log_level, redact
from outbox_core.errors import InvalidConfig
from outbox_core.kafka.admin import check_connection
from outbox_core.metrics import MetricsServer
from outbox_core.printable import plural, preview, printable, printable_json, text_or_base64
from outbox_queue.config import QueueConfig
from outbox_queue.dead_letters.store import DeadLetter, DeadLetters
from outbox_queue.operations.stats import Glance, QueueStats, messages_in_progress, queue_stats, waiting_messages
from outbox_queue.protocol.clients import common_settings
from outbox_queue.redelivery.tracker import RedeliveryTracker
from outbox_queue.times import utc_time

_BOOTSTRAP = "OUTBOX_KAFKA_BOOTSTRAP"
_PROPERTY_PREFIX = "OUTBOX_KAFKA_"
_OVERRIDES = ("bootstrap_servers", "message_topic", "marker_topic", "dead_letter_topic")
_SHOWN = 60
_NAMED = 20
_WAIT_SECONDS = 1.0
_CONNECT_SECONDS = 5.0

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run `outbox queue ARGV`; return the exit code. An OutboxError is left to the caller."""
    options = build_parser().parse_args(argv)
    code: int = options.command(options)
    return code


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `outbox queue`."""
    parser = argparse.ArgumentParser(
        prog="outbox queue",
        description="Operate message queues on Kafka. "
        f"Options win over {_BOOTSTRAP} and {_PROPERTY_PREFIX}<PROPERTY>, those over the file.",
    )
    _add_settings(parser, properties="common_properties")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    tracker = _add(commands, "tracker", _track, "redeliver messages that no consumer finishes; always run at least one")
    tracker.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics and /healthz there; 0: any")
    tracker.add_argument("--metrics-host", metavar="HOST", default="127.0.0.1", help="default: %(default)s")
    tracker.add_argument("--log-level", metavar="LEVEL", help="debug, info (default), warn or error")
    add_log_format_argument(tracker, variables=True)
    stats = _add(commands, "stats", _show_stats, "count waiting messages, messages in progress and dead letters")
    stats.add_argument("--queue", metavar="NAME", help="only this queue")
    _add_json(stats)
    peek = _add(commands, "peek", _peek, "show messages without taking them")
    peek.add_argument("--queue", metavar="NAME", required=True, help="name of the queue")
    peek.add_argument("--in-progress", action="store_true", help="show messages in progress instead of waiting ones")
    _add_json(peek, limit=True)
    letters = _add(commands, "dead-letters", _list_dead_letters, "list, requeue or discard dead letters")
    letters.add_argument("--queue", metavar="NAME", help="only of this queue")
    _add_json(letters, limit=True)
    actions = letters.add_subparsers(title="commands", metavar="COMMAND")
    _add_choice(
        _add(
            actions, "requeue", _requeue, "send dead letters to their queues again, with all their attempts before them"
        )
    )
    discard = _add(actions, "discard", _discard, "delete dead letters")
    discard.description = (
        "Delete dead letters for good. Asks before it does so; with --all and without a terminal it wants --yes."
    )
    _add_choice(discard)
    discard.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parser


def _add(commands: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    _add_settings(parser)
    parser.set_defaults(command=command)
    return parser


def _add_settings(parser: argparse.ArgumentParser, *, properties: str = "properties") -> None:
    """Add options that may stand before or behind a command's name: without defaults, which would undo each other."""

    def add(*names: str, **how: Any) -> None:
        parser.add_argument(*names, default=argparse.SUPPRESS, **how)

    add("-f", "--file", metavar="FILE", help="YAML file, also of kafka-mq-go")
    add("--bootstrap-servers", metavar="HOST:PORT,...", help=f"the Kafka cluster; or {_BOOTSTRAP}")
    add("--message-topic", metavar="TOPIC", help="default: messages")
    add("--marker-topic", metavar="TOPIC", help="default: markers")
    add("--dead-letter-topic", metavar="TOPIC", help="default: the message topic's and -dead-letters")
    add(
        "-X", dest=properties, action="append", type=_property, metavar="PROPERTY=VALUE", help="any librdkafka property"
    )


def _add_json(parser: argparse.ArgumentParser, *, limit: bool = False) -> None:
    if limit:
        parser.add_argument(
            "--limit", type=_count, default=20, metavar="N", help="show at most N; default: %(default)s"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", metavar="NAME", default=argparse.SUPPRESS, help="only of this queue")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--id", action="append", metavar="ID", help="ID as listed; repeat for several")
    which.add_argument("--all", action="store_true", help="all dead letters")
    parser.add_argument("-n", "--dry-run", action="store_true", help="show what would be done, and do nothing")


# -- the commands ------------------------------------------------------------------------------------------------------


def _track(options: argparse.Namespace) -> int:
    configure_logging(
        log_level(None, environ=os.environ, override=options.log_level),
        log_format(None, environ=os.environ, override=options.log_format),
    )
    config = _config(options)
    tracker = RedeliveryTracker(config)
    with ExitStack() as stack:
        if options.metrics_port is not None:
            server = MetricsServer(options.metrics_host, options.metrics_port, tracker.metrics.registry, tracker.health)
            stack.enter_context(server)
            _log.info("serving /metrics and /healthz on %s port %d", options.metrics_host, server.port)
        stack.enter_context(stop_on_signals(tracker.stop))
        tracker.start()
        try:
            while not tracker.join(_WAIT_SECONDS) and not tracker.is_stopping:
                pass
            if not tracker.join(config.close_timeout.total_seconds()):
                return fail("the tracker did not end: Kafka does not answer", EXIT_ENDED_BY_ERROR)
        except Exception as error:  # the tracker has logged it, with where it happened
            return fail(redact(str(error)) or type(error).__name__, EXIT_ENDED_BY_ERROR)
    return 0


def _reachable(options: argparse.Namespace) -> QueueConfig:
    """Return the settings; raise KafkaUnavailable if the cluster does not answer, within seconds and by its address."""
    config = _config(options)
    check_connection(common_settings(config), timeout_seconds=_CONNECT_SECONDS)
    return config


def _show_stats(options: argparse.Namespace) -> int:
    rows = queue_stats(_reachable(options), options.queue)
    if options.json:
        _print_json(row._asdict() for row in rows)
    else:
        _print_table(["QUEUE", "WAITING", "IN PROGRESS", "OLDEST", "DEAD LETTERS"], [_stats_row(row) for row in rows])
    return 0


def _peek(options: argparse.Namespace) -> int:
    read = messages_in_progress if options.in_progress else waiting_messages
    with closing(read(_reachable(options), options.queue)) as found:
        messages = list(islice(found, options.limit))
    if options.json:
        _print_json(map(_shown_whole, messages))
    else:
        rows = [
            [one.place, one.id, str(one.attempt), _time(one.enqueued_at_ms), preview(one.payload, _SHOWN)]
            for one in messages
        ]
        _print_table(["PLACE", "ID", "ATTEMPT", "ENQUEUED", "PAYLOAD"], rows)
    return 0


def _list_dead_letters(options: argparse.Namespace) -> int:
    letters = DeadLetters(_reachable(options)).all(options.queue)[: options.limit]
    if options.json:
        _print_json(map(_shown_whole, letters))
    else:
        _print_letters(letters)
    return 0


def _requeue(options: argparse.Namespace) -> int:
    letters = DeadLetters(_reachable(options))
    if options.dry_run:
        return _show("requeue", _chosen(letters, options), options)
    return _report("requeued", letters.requeue(_choice(options)), options)


def _discard(options: argparse.Namespace) -> int:
    letters = DeadLetters(_reachable(options))
    if options.dry_run:
        return _show("discard", _chosen(letters, options), options)
    found = _chosen(letters, options)
    if found and not options.yes and not _is_confirmed(found, options):
        return fail("nothing was discarded", EXIT_NOT_CONFIRMED)
    return _report("discarded", letters.discard(set(found).__contains__), options)  # and nothing that has come since


def _is_confirmed(found: Sequence[DeadLetter], options: argparse.Namespace) -> bool:
    ask = asker()
    if ask is None:
        if options.all:
            raise InvalidConfig(
                f"discard --all: this deletes {plural(len(found), 'message')} for good; say --yes if that is meant, or "
                "see them with --dry-run"
            )
        return True
    _print_letters(found[:_NAMED])
    more = f" (and {len(found) - _NAMED} more)" if len(found) > _NAMED else ""
    return ask(f"Delete {plural(len(found), 'message')}{more} for good?")


def _chosen(letters: DeadLetters, options: argparse.Namespace) -> list[DeadLetter]:
    return list(filter(_choice(options), letters.all()))


def _show(verb: str, found: Sequence[DeadLetter], options: argparse.Namespace) -> int:
    if found:
        _print_letters(found)
    return _report(f"would {verb}", found, options)


def _report(verb: str, done: Sequence[DeadLetter], options: argparse.Namespace) -> int:
    sys.stdout.write(f"{verb} {plural(len(done), 'message')}\n")
    missing = sorted({*(options.id or ())} - {letter.id for letter in done})
    if missing:
        return fail(f"no such dead letter: {', '.join(missing)}", EXIT_ENDED_BY_ERROR)
    return 0


def _choice(options: argparse.Namespace) -> Any:
    wanted = None if options.all else set(options.id)

    def choose(letter: DeadLetter) -> bool:
        return (options.queue in (None, letter.queue)) and (wanted is None or letter.id in wanted)

    return choose


# -- settings ----------------------------------------------------------------------------------------------------------


def _config(options: argparse.Namespace) -> QueueConfig:
    given = {name: getattr(options, name) for name in _OVERRIDES if getattr(options, name, None)}
    if os.environ.get(_BOOTSTRAP):
        given.setdefault("bootstrap_servers", os.environ[_BOOTSTRAP])
    properties = _properties(os.environ)
    for place in ("common_properties", "properties"):
        properties |= getattr(options, place, ())
    file = getattr(options, "file", None)
    if file is None:
        if "bootstrap_servers" not in given:
            raise InvalidConfig(f"no Kafka cluster: pass --bootstrap-servers or -f, or set {_BOOTSTRAP}")
        return QueueConfig(**given, kafka=properties)
    config = QueueConfig.from_yaml(file, **given)
    return config.for_queue(kafka={**config.kafka, **properties}) if properties else config


def _properties(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(_PROPERTY_PREFIX).lower().replace("_", "."): value
        for name, value in environ.items()
        if name.startswith(_PROPERTY_PREFIX) and name != _BOOTSTRAP and value
    }


def _property(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        # Without the text itself: it may be a password.
        raise argparse.ArgumentTypeError("write PROPERTY=VALUE, for example security.protocol=ssl")
    return name.strip(), value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


# -- output ------------------------------------------------------------------------------------------------------------


def _stats_row(row: QueueStats) -> list[str]:
    age = "-" if row.oldest_unfinished_seconds is None else f"{row.oldest_unfinished_seconds:.0f} s"
    return [row.queue, str(row.waiting), str(row.in_progress), age, str(row.dead_letters)]


def _print_table(titles: list[str], rows: list[list[str]]) -> None:
    # Any program with rights on the topics may write names and reasons.
    for line in aligned([titles, *([printable(cell) for cell in row] for row in rows)]):
        sys.stdout.write(f"{line}\n")


def _print_letters(letters: Sequence[DeadLetter]) -> None:
    rows = [
        [one.queue, one.id, str(one.attempts), _time(one.dead_at_ms), one.reason[:_SHOWN], preview(one.payload, _SHOWN)]
        for one in letters
    ]
    _print_table(["QUEUE", "ID", "ATTEMPTS", "SINCE", "REASON", "PAYLOAD"], rows)


def _print_json(objects: Iterable[Mapping[str, Any]]) -> None:
    for one in objects:
        sys.stdout.write(printable_json(one) + "\n")


def _shown_whole(message: Glance | DeadLetter) -> dict[str, Any]:
    shown = {name: value for name, value in message._asdict().items() if name not in ("key", "partitions")}
    shown["headers"] = [[name, None if value is None else text_or_base64(value)] for name, value in message.headers]
    return {**shown, "payload": text_or_base64(message.payload)}


def _time(milliseconds: int | None) -> str:
    return "-" if milliseconds is None else utc_time(milliseconds).strftime("%Y-%m-%dT%H:%M:%SZ")
