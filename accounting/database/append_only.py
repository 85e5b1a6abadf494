"""Triggers by which the database itself refuses edits of a table. Migrations call this, also those that ran long ago: what
it makes never changes."""

from __future__ import annotations

from alembic import op


def refuse_edits(table: str, allowed: str = "") -> None:
    """Refuses every DELETE and UPDATE of rows, but for updates of which the condition `allowed` holds. Migration 0001
    makes PostgreSQL's function `headgate_append_only`."""
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    for verb, exempt in (("DELETE", ""), ("UPDATE", allowed)):
        trigger = f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} FOR EACH ROW "
        if is_postgresql:
            when = f"WHEN (({exempt}) IS NOT TRUE) " if exempt else ""
            op.execute(f"{trigger}{when}EXECUTE FUNCTION headgate_append_only()")
        else:
            when = f"WHEN NOT ({exempt}) " if exempt else ""
            op.execute(f"{trigger}{when}BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END")
    if is_postgresql:
        op.execute(
            f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION headgate_append_only()"
        )
