"""PostgreSQL tables as targets: projections of pipelines, and the format `outbox_postgres`."""
