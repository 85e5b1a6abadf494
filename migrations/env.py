"""Alembic's entry: runs on the connection that accounting.migrate holds under its lock. Imports the models only."""

from alembic import context
from sqlalchemy import Connection

from accounting.batch_models import Base  # with it, every table is known


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        # SQLite can roll DDL back once BEGIN is said by us; Alembic does not assume so.
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
