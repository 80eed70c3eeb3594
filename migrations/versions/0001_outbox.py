"""The outbox table."""

from outbox_sqlalchemy.alembic import outbox_0001

revision = "outbox_0001"
down_revision = None
branch_labels = None
depends_on = None

upgrade, downgrade = outbox_0001()
