"""The tables of an outbox's history."""

from outbox_sqlalchemy.alembic import outbox_0005

revision = "outbox_0005"
down_revision = "outbox_0004"
branch_labels = None
depends_on = None

upgrade, downgrade = outbox_0005()
