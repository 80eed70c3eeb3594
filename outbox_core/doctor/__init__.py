"""Checks of a configuration, its database and its cluster, for `outbox doctor` and `outbox status`."""
