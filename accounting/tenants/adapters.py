"""LoRA adapters that the operator registered: their names, their base models, and the tenants that may use them.

The module knows paths as text only, as the files are on the workers. It does not know which worker has loaded one.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from sqlalchemy import Row, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.paging import Page, newest_first, one
from accounting.tables.adapter_models import Adapter
from accounting.tables.models import Tenant
from accounting.values.errors import ConflictError, InvalidError, NameTakenError, NotFoundError
from accounting.values.ids import new_id

MAX_PER_MODEL = 256
REMEMBERED_S = 7 * 86_400
"""Seconds after its end for which a worker that still has an adapter is asked to drop it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class AdapterInfo(msgspec.Struct, frozen=True):
    id: str
    """The id is also its name on the workers, so that a name that is used again is another adapter."""
    model: str
    name: str
    path: str
    tenant_id: str | None
    """The tenant that sees it. None stands for every tenant."""
    created_at: int
    deleted_at: int | None = None

    @property
    def served_id(self) -> str:
        """The value that clients put into `model`."""
        return f"{self.model}:{self.name}"


async def create(
    conn: AsyncConnection, *, model: str, name: str, path: str, tenant_id: str | None, now: int, actor: str
) -> AdapterInfo:
    """Registers an adapter. Raises InvalidError, ConflictError for a name in use or too many adapters, NotFoundError
    for an unknown tenant."""
    if _NAME.fullmatch(name) is None:
        raise InvalidError("A name has letters, digits, '.', '_' and '-', at most 64.", "name")
    if tenant_id is not None:
        known = select(func.count()).select_from(Tenant).where(Tenant.id == tenant_id)
        if not await conn.scalar(known):
            raise NotFoundError
    info = AdapterInfo(new_id("adapter"), model, name, path, tenant_id, now)
    detail = {"model": model, "name": name, "path": path}
    # This comes first, as its lock makes others wait that would take the same name.
    await auth_epoch.record(
        conn, "adapter.created", actor=actor, now=now, tenant_id=tenant_id, object_id=info.id, detail=detail
    )
    of_model = select(Adapter.name).where(Adapter.model == model, Adapter.deleted_at.is_(None))
    names = set(await conn.scalars(of_model))
    if name in names:
        raise NameTakenError("The model has an adapter of this name already.")
    if len(names) >= MAX_PER_MODEL:
        raise ConflictError(f"A model has at most {MAX_PER_MODEL} adapters.")
    await conn.execute(insert(Adapter).values(**msgspec.structs.asdict(info)))
    return info


async def get(conn: AsyncConnection, adapter_id: str) -> AdapterInfo:
    """Returns an adapter in force. Raises NotFoundError."""
    query = select(Adapter.__table__).where(Adapter.id == adapter_id, Adapter.deleted_at.is_(None))
    return _info(await one(conn, query))


async def list_adapters(conn: AsyncConnection, *, after: str | None, limit: int) -> Page[AdapterInfo]:
    query = select(Adapter.__table__).where(Adapter.deleted_at.is_(None))
    page = await newest_first(conn, query, Adapter, after, limit, ever=select(Adapter.__table__))
    return page.of(_info)


async def known(conn: AsyncConnection, now: int) -> list[AdapterInfo]:
    """Returns the adapters in force and those that ended within `REMEMBERED_S`, oldest first."""
    recent = or_(Adapter.deleted_at.is_(None), Adapter.deleted_at > now - REMEMBERED_S)
    query = select(Adapter.__table__).where(recent).order_by(Adapter.created_at, Adapter.id)
    return [_info(row) for row in await conn.execute(query)]


async def delete(conn: AsyncConnection, adapter_id: str, *, now: int, actor: str) -> None:
    """Ends an adapter. Raises NotFoundError."""
    ended = update(Adapter).where(Adapter.id == adapter_id, Adapter.deleted_at.is_(None))
    if (await conn.execute(ended.values(deleted_at=now))).rowcount != 1:
        raise NotFoundError
    await auth_epoch.record(conn, "adapter.deleted", actor=actor, now=now, object_id=adapter_id)


def _info(row: Row[Any]) -> AdapterInfo:
    return AdapterInfo(**row._mapping)
