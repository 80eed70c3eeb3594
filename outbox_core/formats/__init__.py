"""Formats at stash time: what becomes of a record before it is written to the table."""
