"""Errors of the caller's driver, whichever it is."""

from __future__ import annotations

ABORTED_TRANSACTION = "25P02"
"""The SQLSTATE of a statement in a transaction that an error has aborted."""


def sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE of a driver's error, or of the one that a framework's error was made of; '' for none."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if state is None and each is not None and each.args and isinstance(each.args[0], dict):
            state = each.args[0].get("C")  # of pg8000: the fields of the server's message
        if isinstance(state, str) and state:
            return state
    return ""
