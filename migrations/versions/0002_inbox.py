"""The inbox table."""

from outbox_sqlalchemy.alembic import outbox_0002

revision = "outbox_0002"
down_revision = "outbox_0001"
branch_labels = None
depends_on = None

upgrade, downgrade = outbox_0002()
