"""Lists by key, newest first unless asked otherwise: a page goes on behind the last object the caller saw. Knows no table."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import Row, Select, and_, or_
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from accounting.errors import InvalidError

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    has_more: bool


async def newest_first(
    conn: AsyncConnection,
    query: Select[Any],
    created: InstrumentedAttribute[int],
    id_: InstrumentedAttribute[str],
    after: str | None,
    limit: int,
    *,
    oldest_first: bool = False,
) -> Page[Row[Any]]:
    """`after` must be an id that `query` itself could return: another tenant's is unknown here."""
    if after is not None:
        seen = (await conn.execute(query.where(id_ == after))).first()
        if seen is None:
            raise InvalidError("The object named in 'after' does not exist.", "after")
        if oldest_first:
            newer = and_(created == seen.created_at, id_ > after)
            query = query.where(or_(created > seen.created_at, newer))
        else:
            older = and_(created == seen.created_at, id_ < after)
            query = query.where(or_(created < seen.created_at, older))
    order = (created, id_) if oldest_first else (created.desc(), id_.desc())
    rows = (await conn.execute(query.order_by(*order).limit(limit + 1))).all()
    return Page(list(rows[:limit]), len(rows) > limit)
