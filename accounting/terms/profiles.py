"""The profiles of the operator and of its customers. A change is in the audit log; a closed document keeps its copy."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit
from accounting.database.db import upsert
from accounting.tables.billing_models import BillingProfile, Logo
from accounting.tables.models import Tenant
from accounting.terms.parties import MAX_LOGO_BYTES, Customer, Issuer, checked
from accounting.values.errors import InvalidError, NotFoundError

ISSUER = "issuer"
DEFAULT_NAME = "Headgate"
MAX_LOGO_PIXELS = 4_000_000
LOGGED = ("tax", "tax_rate", "payment_days", "invoice_prefix", "credit_note_prefix")
"""The fields whose values the audit log has. It outlives everything, so of addresses and accounts it has the names alone."""
P = TypeVar("P", Issuer, Customer)


async def issuer(conn: AsyncConnection) -> Issuer:
    found = await _read(conn, ISSUER, Issuer)
    return found if found.name else msgspec.structs.replace(found, name=DEFAULT_NAME)


async def customer(conn: AsyncConnection, tenant_id: str) -> Customer:
    """Returns the profile; its name is the tenant's if it has none. Raises NotFoundError."""
    name = await conn.scalar(select(Tenant.name).where(Tenant.id == tenant_id))
    if name is None:
        raise NotFoundError("There is no such tenant.")
    found = await _read(conn, tenant_id, Customer)
    return found if found.name else msgspec.structs.replace(found, name=name)


async def change_issuer(conn: AsyncConnection, changes: Mapping[str, Any], *, now: int, actor: str) -> Issuer:
    """Changes the named fields; None sets a field's default. `logo` is a picture in base64. Raises InvalidError."""
    wanted = dict(changes)
    if wanted.get("logo"):
        wanted["logo"] = await _keep_logo(conn, wanted["logo"])
    await _lock(conn, ISSUER, now)
    made = checked(_merged(await _read(conn, ISSUER, Issuer), wanted))
    await _write(conn, ISSUER, made, now)
    detail = _logged(changes)
    await audit.record(conn, "headgate.issuer.updated", actor=actor, now=now, object_id=ISSUER, detail=detail)
    return await issuer(conn)


async def change_customer(
    conn: AsyncConnection, tenant_id: str, changes: Mapping[str, Any], *, now: int, actor: str
) -> Customer:
    """Changes the named fields; None sets a field's default. Raises InvalidError and NotFoundError."""
    await customer(conn, tenant_id)
    await _lock(conn, tenant_id, now)
    made = checked(_merged(await _read(conn, tenant_id, Customer), changes))
    await _write(conn, tenant_id, made, now)
    await audit.record(
        conn,
        "headgate.billing_profile.updated",
        actor=actor,
        now=now,
        tenant_id=tenant_id,
        object_id=tenant_id,
        detail=_logged(changes),
    )
    return await customer(conn, tenant_id)


async def is_customer_set(conn: AsyncConnection, tenant_id: str) -> bool:
    """Says whether the tenant's profile has any field that is not its default."""
    return bool(await conn.scalar(select(BillingProfile.profile).where(BillingProfile.owner == tenant_id)))


async def forget(conn: AsyncConnection, tenant_id: str) -> None:
    """Deletes an erased tenant's profile. Its invoices keep their copies, as the law wants them kept."""
    await conn.execute(delete(BillingProfile).where(BillingProfile.owner == tenant_id))


async def logo(conn: AsyncConnection, name: str) -> bytes | None:
    return await conn.scalar(select(Logo.content).where(Logo.hash == name)) if name else None


async def _read(conn: AsyncConnection, owner: str, kind: type[P]) -> P:
    found = await conn.scalar(select(BillingProfile.profile).where(BillingProfile.owner == owner))
    return msgspec.convert(found or {}, kind)


async def _lock(conn: AsyncConnection, owner: str, now: int) -> None:
    """Makes the profile's row if there is none, and locks it: of two changes at one time, neither loses what the other
    one wrote."""
    values = {"owner": owner, "profile": {}, "changed_at": now}
    await conn.execute(upsert(conn, BillingProfile.__table__).values(**values).on_conflict_do_nothing())
    await conn.execute(select(BillingProfile.owner).where(BillingProfile.owner == owner).with_for_update())


async def _write(conn: AsyncConnection, owner: str, profile: Issuer | Customer, now: int) -> None:
    values = {"profile": msgspec.to_builtins(profile), "changed_at": now}
    await conn.execute(update(BillingProfile).where(BillingProfile.owner == owner).values(**values))


def _merged(before: P, changes: Mapping[str, Any]) -> P:
    defaults = type(before)()
    values = {name: getattr(defaults, name) if value is None else value for name, value in changes.items()}
    return msgspec.structs.replace(before, **values)


def _logged(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {"fields": sorted(changes), **{name: changes[name] for name in LOGGED if name in changes}}


async def _keep_logo(conn: AsyncConnection, text: str) -> str:
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one, and so is that of characters outside of ASCII
        raise InvalidError("The logo is not base64.", "logo") from None
    _check_picture(content)
    name = sha256(content).hexdigest()
    await conn.execute(upsert(conn, Logo.__table__).values(hash=name, content=content).on_conflict_do_nothing())
    return name


def _check_picture(content: bytes) -> None:
    from PIL import Image

    if len(content) > MAX_LOGO_BYTES:
        raise InvalidError(f"The logo has {len(content)} bytes; at most {MAX_LOGO_BYTES} fit.", "logo")
    try:
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
            width, height = picture.size
            if width * height > MAX_LOGO_PIXELS:
                raise InvalidError(f"The logo has {width} times {height} pixels: too many.", "logo")
            picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise InvalidError("The logo is no PNG or JPEG picture.", "logo") from None
