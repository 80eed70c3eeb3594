"""`outbox claims`, shared with Django's `outbox_claims`: payloads in a claim store that no record names any more."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from outbox_core.claims.claims import store_errors
from outbox_core.claims.stores import FolderStore, FsspecStore, TableStore, store_of
from outbox_core.cli.database import connect
from outbox_core.cli.harvest import add_source_arguments, missing_extra, overrides_from
from outbox_core.cli.inbox import parse_age
from outbox_core.errors import InvalidConfig, OutboxTableError, StoreUnavailable
from outbox_core.schema import TableName

if TYPE_CHECKING:
    from outbox_core.cli.terminal import Output
    from outbox_core.config import HarvestConfig

DESCRIPTION = (
    "Find payloads that neither the outbox nor the topics name: their transaction was rolled back, or Kafka has "
    "removed their records. Reads the topics from the beginning. An error in between deletes nothing."
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `claims` and its own commands to the commands of `outbox`."""
    claims = commands.add_parser("claims", help="find payloads that no record names", description=DESCRIPTION)
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("-f", "--file", metavar="FILE", help="the YAML file of `outbox harvest`")
    add_source_arguments(place, variables=True)
    add_actions(claims, place)
    claims.set_defaults(command=_run)


def add_actions(claims: argparse.ArgumentParser, place: argparse.ArgumentParser) -> None:
    """Add the actions, each with its own options and those of `place`."""
    actions = claims.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    for name, text in (("list", "print the names of orphans"), ("delete", "delete orphans, and print their names")):
        parser = actions.add_parser(name, help=text, description=DESCRIPTION, parents=[place])
        parser.add_argument(
            "--store", required=True, metavar="STORE", help="a folder, postgresql://... or a URL of fsspec: s3://..."
        )
        parser.add_argument(
            "--older-than", type=_age, required=True, metavar="AGE", help="longer than any transaction, such as 1d"
        )
        parser.add_argument(
            "--topic",
            action="append",
            default=[],
            metavar="TOPIC",
            help="a topic to read besides those in the names, such as a queue's dead letters; may be repeated",
        )
        parser.add_argument(
            "--other-table", action="append", default=[], metavar="NAME", help="a further outbox; may be repeated"
        )


def _run(options: argparse.Namespace) -> int:
    try:
        from outbox_core.config import load_config, read_document
    except ImportError as error:
        raise missing_extra(error) from None
    document = read_document(options.file) if options.file is not None else None
    config = load_config(document, environ=os.environ, overrides=overrides_from(vars(options)))
    run_claims(config, sys.stdout, options)
    return 0


def run_claims(config: HarvestConfig, out: Output, options: argparse.Namespace) -> None:
    """Find orphans, print their names, and delete them if that is the action."""
    try:
        from outbox_core.claims.orphans import find_orphans
    except ImportError as error:
        raise missing_extra(error) from None
    store, before = _store(options.store), datetime.now(UTC) - options.older_than
    connection, outbox = connect(config.data_source, TableName.parse(config.outbox_table))
    import psycopg

    with connection:
        identity = f"{connection.info.dbname}.{outbox}"
        dead_letters = config.dead_letter_name(identity)
        topics = {*options.topic, *_existing(config.base_kafka_config, dead_letters)}
        try:
            orphans = find_orphans(
                store,
                connection,
                [outbox, *map(TableName.parse, options.other_table)],
                config.base_kafka_config,
                group=config.leader_names(identity).group_id,
                before=before,
                topics=topics,
            )
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            raise OutboxTableError(f"no outbox: {error.diag.message_primary}") from None
        except psycopg.errors.InsufficientPrivilege as error:
            needs = f"role {connection.role} needs SELECT on outbox and archive"
            raise OutboxTableError(f"{error.diag.message_primary}; {needs}") from None
        except psycopg.OperationalError as error:
            raise StoreUnavailable(f"the database failed: {error}; run the command again") from None
    for name in orphans:
        if options.action == "delete":
            with store_errors(store, f"payload {name} could not be deleted"):
                store.delete(name)
        out.write(f"{name}\n")


def _store(text: str) -> FolderStore | FsspecStore | TableStore:
    from outbox_core.config import normalise_data_source

    try:
        # The driver would quote a URL that it cannot read, perhaps its password.
        text = normalise_data_source(text) if text.startswith("postgres") and "://" in text else text
    except ValueError as error:
        raise InvalidConfig(f"--store: {error}") from None
    if "://" not in text and not Path(text).is_dir():
        raise InvalidConfig(f"--store: there is no folder {text}")
    return store_of(text)


def _existing(kafka: dict[str, object], topic: str) -> set[str]:
    from outbox_core.kafka.topics import partition_count

    return {topic} if partition_count(kafka, topic) else set()


def _age(text: str) -> object:
    try:
        return parse_age(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
