"""Two applications that use the outbox, and a demo that runs both: see README.md."""
