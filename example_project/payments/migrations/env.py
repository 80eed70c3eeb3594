"""Alembic's environment of the payment service, as any application has one; nothing here is about the outbox."""

from alembic import context
from sqlalchemy import create_engine, pool

from example_project.payments.database import database_url
from example_project.payments.models import Base

if context.is_offline_mode():
    raise SystemExit("the example's migrations run on a database only")

with create_engine(database_url(), poolclass=pool.NullPool).connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()
