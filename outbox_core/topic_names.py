"""The one rule for topic names: those that Kafka accepts, and those that records may use."""

from __future__ import annotations

import re
from typing import Final

MAX_TOPIC_LENGTH: Final = 249
_LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")
_CONTROL_SUFFIXES = (".neli", ".manifests", ".relay-manifests")
_DEAD_LETTERS = re.compile(r"[^.]+\.[^.]+\..+\.dead-letter")
"""`<database>.<schema>.<table>.dead-letter`, of any outbox."""


def is_legal(topic: str) -> bool:
    """Return True if Kafka accepts a topic of this name."""
    return _LEGAL.match(topic) is not None and topic not in (".", "..")


def must_be_legal(topic: str) -> str:
    """Return a topic's name from the configuration; raise ValueError if Kafka does not accept it."""
    if not is_legal(topic):
        raise ValueError(f"is not a topic name: 1 to {MAX_TOPIC_LENGTH} of the characters a-z A-Z 0-9 . _ -")
    return topic


def topic_problem(topic: str) -> str | None:
    """Return why records may not name a topic, None if they may."""
    if not is_legal(topic):
        return (
            f"{topic[:300]!r} is not a legal topic name: 1 to {MAX_TOPIC_LENGTH} of a-z A-Z 0-9 . _ - and neither "
            "'.' nor '..'"
        )
    # A record in one of these breaks the transactions of all others.
    if topic.startswith("__"):
        return f"{topic!r} is one of Kafka's own topics: names that begin with '__' are not for records"
    # For every outbox: recovery believes manifests, and claims depose leaders.
    if topic.endswith(_CONTROL_SUFFIXES):
        return f"{topic!r} is a topic that outboxes are run through: {', '.join(_CONTROL_SUFFIXES)} are not for records"
    # An operator would take a forged letter for one of that outbox's, and stash it anew there.
    if _DEAD_LETTERS.fullmatch(topic):
        return f"{topic!r} is named as the dead-letter topic of an outbox: these are not for records"
    return None
