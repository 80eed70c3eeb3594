"""A process that stashes a large payload and dies at a given moment."""

import os
import signal
import sys

import psycopg

from outbox_core import OutboxRecord, Stasher
from outbox_core.claims import FolderStore, TableStore

database, folder, topic, moment = sys.argv[1:]


def die():
    """End as a process without memory does."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(FolderStore):
    """A store in which the process dies within or after the write."""

    def put(self, name, payload):
        if moment == "before-upload":
            die()
        if moment == "during-upload":
            super().put(name, payload[: len(payload) // 2])
            die()
        super().put(name, payload)
        if moment == "after-upload":
            die()


in_database = folder == "in-database"
store = TableStore(lambda: psycopg.connect(database), with_record=True) if in_database else DyingStore(folder)
with psycopg.connect(database) as connection:
    stasher = Stasher(claim_store=store, claim_check_above=100)
    stasher.stash(connection, OutboxRecord(topic, "k", b"x" * 1000))
    if moment == "before-commit":
        die()
if moment == "after-commit":
    die()
