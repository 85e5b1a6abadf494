"""Alembic's entry: runs on the connection that accounting.database.migrate holds under its lock. Imports the models only."""

import importlib
import pkgutil

from alembic import context
from sqlalchemy import Connection

from accounting import tables
from accounting.tables.models import Base

for module in pkgutil.iter_modules(tables.__path__):  # with them, every table is known
    importlib.import_module(f"accounting.tables.{module.name}")


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        # SQLite can roll DDL back once BEGIN is said by us; Alembic does not assume so.
        transactional_ddl=True,
        on_version_apply=context.config.attributes["applied"],
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
