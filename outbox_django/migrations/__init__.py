"""The schema of the outbox; the same table as `outbox schema` prints."""
