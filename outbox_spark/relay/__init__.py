"""An outbox table into topics by many tasks of Spark at once, exactly once; and the format `outbox`."""
