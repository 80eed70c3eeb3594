"""The names of a leader's work, and of the calls that it waits for: what logs, health and the watch say.

A name of work completes "it could not ...", a name of a step "it waits for ...".
"""

from __future__ import annotations

from typing import Final, NamedTuple

READ: Final = "read the outbox table"
ASK: Final = "read the outbox's holds and marks"
DELETE: Final = "delete published rows"

BEGIN: Final = "settle what the last leader began"
PUBLISH: Final = "end a transaction"
WRITE: Final = "write its records to Kafka"
"""Exactly once. Each aborted transaction that Kafka has answered for is the end of PUBLISH, not that of WRITE."""

REACH: Final = "write to partitions whose leader is there"
"""Others may be written meanwhile."""

MAKE: Final = "make a producer"
"""At least once; exactly once makes one to BEGIN."""

KEEP_TIME: Final = "send in the time of its lease"

TELL: Final = "hand an event to the application"
"""On the harvest thread, which waits for the handler."""

OF_DATABASE: Final = frozenset({READ, ASK, DELETE})
OF_KAFKA: Final = frozenset({BEGIN, PUBLISH, WRITE, REACH, MAKE, KEEP_TIME})


class Step(NamedTuple):
    """A statement's name, and the work that it belongs to."""

    name: str
    work: str  # '' for none: it may take long, and another leader would begin it anew


MARK: Final = Step("a mark", READ)
SCAN: Final = Step("a scan", READ)
LOOK: Final = Step("a look at what waits", READ)
PURGE: Final = Step("a purge", DELETE)
DEAD_LETTERS: Final = Step("the deletion of dead letters", DELETE)
HOLDS: Final = Step("the reading of holds", ASK)
STATEMENT: Final = Step("a statement", ASK)
WHOLE_TABLE: Final = Step("a statement that reads the whole table", "")
