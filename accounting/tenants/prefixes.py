"""Public prefixes: prompts that the operator registered for all tenants, stored as token ids.

The module knows which are in force. It does not know regions, workers or which requests hit them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, and_, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.tables.models import PublicPrefix
from accounting.values import texts
from accounting.values.errors import ConflictError, NotFoundError
from accounting.values.ids import new_id

MAX_PER_MODEL = 256
"""The most prefixes of a model in force at one time: each request's prompt is compared with all of them."""


class PrefixInfo(msgspec.Struct, frozen=True):
    id: str
    name: str
    model: str
    tokens: tuple[int, ...]
    created_at: int
    expires_at: int | None
    """Unix seconds. None stands for a prefix that stays until it is deleted."""


async def create(
    conn: AsyncConnection, *, name: str, model: str, tokens: Sequence[int], ttl_s: int | None, now: int, actor: str
) -> PrefixInfo:
    """Registers a prefix. Raises InvalidError for its name, and ConflictError if the same tokens are registered already,
    or if there are too many prefixes."""
    await auth_epoch.hold(conn)
    packed = _packed(tokens)
    of_model = and_(PublicPrefix.model == model, _in_force(now))
    same = select(PublicPrefix.id).where(of_model, PublicPrefix.token_ids == packed)
    if (known := await conn.scalar(same)) is not None:
        raise ConflictError(f"These tokens are registered already, as {known}.")
    number = await conn.scalar(select(func.count()).select_from(PublicPrefix).where(of_model))
    if (number or 0) >= MAX_PER_MODEL:
        raise ConflictError(f"A model has at most {MAX_PER_MODEL} public prefixes.")
    info = PrefixInfo(
        new_id("prefix"), texts.checked_name(name), model, tuple(tokens), now, None if ttl_s is None else now + ttl_s
    )
    values = {field: getattr(info, field) for field in info.__struct_fields__ if field != "tokens"}
    await conn.execute(insert(PublicPrefix).values(**values, token_ids=packed))
    detail = {"name": name, "model": model, "num_tokens": len(tokens), "ttl_s": ttl_s}
    await auth_epoch.record(conn, "headgate.prefix.created", actor=actor, now=now, object_id=info.id, detail=detail)
    return info


async def get(conn: AsyncConnection, prefix_id: str, now: int) -> PrefixInfo:
    """Returns a prefix in force. Raises NotFoundError, also for one that has expired."""
    query = select(PublicPrefix.__table__).where(PublicPrefix.id == prefix_id, _in_force(now))
    return _info(await one(conn, query))


async def list_prefixes(conn: AsyncConnection, now: int, *, after: str | None, limit: int) -> Page[PrefixInfo]:
    ever = select(PublicPrefix.__table__)
    page = await newest_first(conn, ever.where(_in_force(now)), PublicPrefix, after, limit, ever=ever)
    return page.of(_info)


async def in_force(conn: AsyncConnection, now: int) -> list[PrefixInfo]:
    """Returns all prefixes in force, oldest first."""
    query = select(PublicPrefix.__table__).where(_in_force(now))
    rows = await conn.execute(query.order_by(PublicPrefix.created_at, PublicPrefix.id))
    return [_info(row) for row in rows]


async def delete(conn: AsyncConnection, prefix_id: str, *, now: int, actor: str) -> None:
    """Ends a prefix. Raises NotFoundError."""
    ended = update(PublicPrefix).where(PublicPrefix.id == prefix_id, _in_force(now))
    if (await conn.execute(ended.values(deleted_at=now))).rowcount != 1:
        raise NotFoundError
    await auth_epoch.record(conn, "headgate.prefix.deleted", actor=actor, now=now, object_id=prefix_id)


def _in_force(now: int) -> ColumnElement[bool]:
    unexpired = or_(PublicPrefix.expires_at.is_(None), PublicPrefix.expires_at > now)
    return and_(PublicPrefix.deleted_at.is_(None), unexpired)


def _info(row: Row[Any]) -> PrefixInfo:
    return shaped(PrefixInfo, row, tokens=tuple(_little_endian(array("i", row.token_ids))))


def _packed(tokens: Sequence[int]) -> bytes:
    return _little_endian(array("i", tokens)).tobytes()


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
