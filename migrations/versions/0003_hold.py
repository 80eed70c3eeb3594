"""The table of an outbox's holds."""

from outbox_sqlalchemy.alembic import outbox_0003

revision = "outbox_0003"
down_revision = "outbox_0002"
branch_labels = None
depends_on = None

upgrade, downgrade = outbox_0003()
