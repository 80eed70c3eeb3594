"""The outbox in PostgreSQL."""
