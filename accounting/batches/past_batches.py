"""A tenant's finished batches tell of its next one: how long answers are, what was cached, how fast lines ran."""

from __future__ import annotations

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables.batch_models import Batch
from accounting.values.types import TOKEN_CLASSES, Usage

MAX_AGE_S = 30 * 86_400
MAX_BATCHES = 20


class PastBatches(msgspec.Struct, frozen=True):
    num_batches: int
    num_lines: int
    """The lines that were answered."""
    usage: Usage
    running_s: int
    """The seconds in which the batches ran, added up."""


async def past_batches(conn: AsyncConnection, tenant_id: str, endpoint: str, model: str, now: int) -> PastBatches:
    """Returns the sums over the latest completed batches of the tenant with that endpoint and model."""
    query = (
        select(
            Batch.num_completed, Batch.in_progress_at, Batch.finalizing_at, *(getattr(Batch, c) for c in TOKEN_CLASSES)
        )
        .where(
            Batch.tenant_id == tenant_id,
            Batch.created_at > now - MAX_AGE_S,
            Batch.state == "completed",
            Batch.endpoint == endpoint,
            Batch.model == model,
            Batch.num_completed > 0,
        )
        .order_by(Batch.created_at.desc(), Batch.id.desc())
        .limit(MAX_BATCHES)
    )
    rows = (await conn.execute(query)).all()
    return PastBatches(
        num_batches=len(rows),
        num_lines=sum(row.num_completed for row in rows),
        usage=Usage(*(sum(getattr(row, name) for row in rows) for name in TOKEN_CLASSES)),
        running_s=sum(max(1, row.finalizing_at - row.in_progress_at) for row in rows),
    )
