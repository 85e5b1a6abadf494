"""The models that give embeddings. Sums of usage know models and no endpoints, and a model is for one task."""

from __future__ import annotations

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import upsert
from accounting.tables.request_models import EmbeddingModel


async def note(conn: AsyncConnection, model: str, now: int) -> None:
    """Notes that a model gives embeddings. Noting it again changes nothing."""
    row = {"model": model, "first_used_at": now}
    await conn.execute(upsert(conn, EmbeddingModel.__table__).values(row).on_conflict_do_nothing())


def models() -> Select[tuple[str]]:
    """Returns the query of all of them."""
    return select(EmbeddingModel.model)
