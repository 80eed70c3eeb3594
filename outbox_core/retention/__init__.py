"""The remains of published records: the history of an outbox, and its archive."""
