"""The outbox, by the library's own revision."""

from outbox_sqlalchemy.alembic import outbox_0001

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

upgrade, downgrade = outbox_0001("payments_outbox")
