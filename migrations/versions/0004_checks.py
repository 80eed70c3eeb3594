"""The outbox's CHECK constraints."""

from outbox_sqlalchemy.alembic import outbox_0004

revision = "outbox_0004"
down_revision = "outbox_0003"
branch_labels = None
depends_on = None

upgrade, downgrade = outbox_0004()
