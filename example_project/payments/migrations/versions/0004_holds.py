"""The table of the outbox's holds: without it a record that Kafka refuses would be tried for ever."""

from outbox_sqlalchemy.alembic import outbox_0003

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

upgrade, downgrade = outbox_0003("payments_outbox")
