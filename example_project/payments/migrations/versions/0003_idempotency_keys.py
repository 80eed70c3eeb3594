"""Payments remember the Idempotency-Key of their request, and an inbox has the keys."""

import sqlalchemy as sa
from alembic import op

from outbox_sqlalchemy.alembic import outbox_0002

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_inbox = outbox_0002("payments_inbox")


def upgrade() -> None:
    """Add the column and its index, and make the inbox."""
    op.add_column("payment", sa.Column("idempotency_key", sa.String(1000), nullable=True))
    op.create_index("payment_idempotency_key_idx", "payment", ["idempotency_key"])
    _inbox.upgrade()


def downgrade() -> None:
    """Undo that."""
    _inbox.downgrade()
    op.drop_index("payment_idempotency_key_idx", "payment")
    op.drop_column("payment", "idempotency_key")
