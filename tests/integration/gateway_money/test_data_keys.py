"""A data key is for tenants that exist."""

from __future__ import annotations

import pytest

from accounting.database.db import Database
from accounting.lifecycle import erasure, tenant_status
from accounting.tenants import tenants
from gateway.base.errors import ApiError
from gateway.idempotency.data_keys import DataKeys


async def test_a_request_of_a_tenant_that_was_erased_meanwhile_is_404(books: Database) -> None:
    async with books.write() as conn:
        gone, other = [(await tenants.create(conn, name, now=1)).id for name in ("gone", "other")]
        await tenant_status.archive(conn, gone, now=1)
        await erasure.erase(conn, gone, retention_days=0, now=1, actor="cli")
    keys = DataKeys(books, b"m" * 32)
    with pytest.raises(ApiError) as refusal:
        await keys.key(gone)
    assert refusal.value.status == 404
    assert await keys.key(other)
