"""Objects as a caller asks for them: one, or a list in pages by key, newest first unless asked otherwise. A page goes on
after the last object that the caller saw. The module knows no table.

Creation times are whole seconds; ids, which carry their creation time (ids.py), give the order within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import Executable, Row, Select, and_, or_
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables.models import Base
from accounting.values.errors import InvalidError, NotFoundError

S = TypeVar("S")
T = TypeVar("T")
V = TypeVar("V", bound=msgspec.Struct)


class Page(msgspec.Struct, Generic[T], frozen=True):
    items: list[T]
    has_more: bool

    def of(self, shape: Callable[[T], S]) -> Page[S]:
        return Page([shape(item) for item in self.items], self.has_more)


async def one(conn: AsyncConnection, query: Executable, sentence: str = "") -> Row[Any]:
    """Returns the row. Raises NotFoundError with this sentence if there is none."""
    row: Row[Any] | None = (await conn.execute(query)).first()
    if row is None:
        raise NotFoundError(sentence)
    return row


def shaped(kind: type[V], row: Any, **others: Any) -> V:
    """Returns a struct whose fields are the row's columns of the same names. `others` are the fields that have no
    column, or another value than theirs."""
    named = {name: getattr(row, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**named, **others)


async def newest_first(
    conn: AsyncConnection,
    query: Select[Any],
    table: type[Base],
    after: str | None,
    limit: int,
    *,
    ever: Select[Any] | None = None,
    oldest_first: bool = False,
    created_at: int | None = None,
) -> Page[Row[Any]]:
    """Returns one page of a table that has `created_at` and a key of one column. `after` must be an id that `ever`
    could return. `ever` selects what `query` lists and also objects that have ended since, as a caller may end objects
    between two pages. Another tenant's id is unknown here. `created_at` is the creation time of `after` where no row
    has it any more. Raises InvalidError."""
    created, (id_,) = table.__table__.c.created_at, table.__table__.primary_key
    if after is not None:
        seen = (await conn.execute((query if ever is None else ever).where(id_ == after))).first()
        at = created_at if seen is None else seen.created_at
        if at is None:
            raise InvalidError("The object named in 'after' does not exist.", "after")
        if oldest_first:
            query = query.where(or_(created > at, and_(created == at, id_ > after)))
        else:
            query = query.where(or_(created < at, and_(created == at, id_ < after)))
    order = (created, id_) if oldest_first else (created.desc(), id_.desc())
    rows = (await conn.execute(query.order_by(*order).limit(limit + 1))).all()
    return Page(list(rows[:limit]), len(rows) > limit)
