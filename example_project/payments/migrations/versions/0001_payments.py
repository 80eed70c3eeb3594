"""Accounts, payments and entries."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "account",
        sa.Column("id", sa.BigInteger(), primary_key=True),
        sa.Column("owner", sa.String(80), nullable=False),
        sa.Column("balance_cents", sa.BigInteger(), nullable=False),
        sa.Column("entries_count", sa.Integer(), nullable=False),
        sa.CheckConstraint("balance_cents >= 0", name="balance"),
    )
    op.create_table(
        "payment",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("payer_id", sa.BigInteger(), sa.ForeignKey("account.id"), nullable=False),
        sa.Column("payee_id", sa.BigInteger(), sa.ForeignKey("account.id"), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("paid_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
    )
    op.create_table(
        "entry",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("account_id", sa.BigInteger(), sa.ForeignKey("account.id"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("payment_id", sa.Uuid(), sa.ForeignKey("payment.id"), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("balance_after_cents", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("account_id", "number"),
    )


def downgrade() -> None:
    """Drop them."""
    for table in ("entry", "payment", "account"):
        op.drop_table(table)
