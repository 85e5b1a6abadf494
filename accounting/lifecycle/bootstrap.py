"""The first start: a tenant `default`, a priced model, an admin key and a tenant key. Later starts find them.

The caller stores the text of the keys (mode 0600); this module only makes and looks up keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import api_keys, credentials, service_accounts
from accounting.database.db import Database
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values import clock
from accounting.values.tenant_types import Credentials
from accounting.values.types import OPERATOR_TENANT, Rates, Tier

logger = logging.getLogger(__name__)

DEFAULT_TENANT = "default"
_UNPRICED = (
    "The last version of the price sheet %s begins or ends later, so no first price was added for %s. "
    "Nobody can use these models before `headgate prices add` names them."
)

EXAMPLE_RATES: dict[Tier, Rates] = {
    "interactive": Rates(cache_read=10_000, cache_write=100_000, uncached=100_000, output=400_000),
    "batch": Rates(cache_read=5_000, cache_write=50_000, uncached=50_000, output=200_000),
}
"""Rates of the demo model, so that its bills show amounts: USD 0.10 in, 0.40 out per million tokens."""
FREE: dict[Tier, Rates] = {"interactive": Rates(0, 0, 0, 0), "batch": Rates(0, 0, 0, 0)}
"""The rates of any other model until the operator sets a price: an explicit 0."""


async def bootstrap(
    url: str, pepper: bytes, models: Mapping[str, Mapping[Tier, Rates]], stored: Credentials | None
) -> Credentials:
    """Returns `stored` if this database knows its keys, else new keys for the tenant `default`. Also prices those of
    `models` that the default sheet never named, and warns of those that it cannot price."""
    now_ms = clock.now_ms()
    database = Database(url)
    try:
        async with database.write() as conn:
            unpriced = await prices.bootstrap(conn, models, now_ms)
            if unpriced:
                logger.warning(_UNPRICED, prices.DEFAULT_SHEET, ", ".join(unpriced))
            if stored is not None and await _known(conn, stored):
                return stored
            return await _make(conn, pepper, now_ms // 1000)
    finally:
        await database.close()


async def _known(conn: AsyncConnection, stored: Credentials) -> bool:
    """Says whether the database knows the stored keys. Another database does not, nor one restored from before the
    first start."""
    for value in (stored.admin_key, stored.api_key):
        parsed = credentials.parse(value)
        if parsed is None or await api_keys.lookup(conn, parsed.public_id) is None:
            return False
    return True


async def _make(conn: AsyncConnection, pepper: bytes, now: int) -> Credentials:
    tenant_id = await _default_tenant(conn, now)
    account = await service_accounts.create_service_account(conn, tenant_id, "first start", now=now)
    key = await api_keys.create(
        conn, pepper, tenant_id=tenant_id, now=now, name="first start", service_account_id=account.id
    )
    admin = await api_keys.create(conn, pepper, tenant_id=OPERATOR_TENANT, now=now, kind="admin", name="first start")
    return Credentials(admin.value, tenant_id, key.value, fresh=True)


async def _default_tenant(conn: AsyncConnection, now: int) -> str:
    after = None
    while True:
        page = await tenants.list_tenants(conn, after=after, limit=100)
        for tenant in page.items:
            if tenant.name == DEFAULT_TENANT:
                return tenant.id
        if not page.has_more:
            return (await tenants.create(conn, DEFAULT_TENANT, now=now)).id
        after = page.items[-1].id
