"""Keys and the principals that they stand for."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, select, update

from accounting.access import api_keys, credentials, principals
from accounting.database import auth_epoch
from accounting.lifecycle import tenant_status
from accounting.tables.batch_models import Batch, File
from accounting.tables.models import ApiKey
from accounting.tenants import tenants
from accounting.values.errors import InvalidError, NotFoundError
from accounting.values.tenant_types import KeyChanges, ModelLimits
from accounting.values.types import OPERATOR_TENANT, Limits


@pytest.fixture
async def tenant(conn) -> str:
    return (await tenants.create(conn, "a", now=1)).id


async def test_a_key_resolves_to_its_tenant_with_limits_and_scopes(conn, tenant, pepper):
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1, scopes=["chat"], models=["m"], expires_at=100)
    await tenants.set_limits(conn, tenant, Limits(1, 2, 3), now=2)
    await tenants.set_model_limits(conn, tenant, ModelLimits("m", Limits(9), None), now=2)
    await api_keys.change(conn, tenant, key.info.id, KeyChanges(concurrency=4), now=2)
    principal = await principals.resolve(conn, pepper, key.value, 50)
    assert principal is not None
    assert (principal.kind, principal.tenant_id, principal.key_id) == ("tenant", tenant, key.info.id)
    assert (principal.scopes, principal.models) == ({"chat"}, {"m"})
    assert (principal.tenant_limits, principal.key_limits) == (Limits(1, 2, 3), Limits(None, None, 4))
    assert principal.tenant_limits == Limits(1, 2, 3)
    assert principal.version == await auth_epoch.auth_epoch(conn)
    assert hash(principal)


async def test_an_admin_key_is_the_operators_and_has_no_tenant_scope(conn, tenant, pepper):
    key = await api_keys.create(conn, pepper, tenant_id=OPERATOR_TENANT, kind="admin", now=1)
    principal = await principals.resolve(conn, pepper, key.value, 2)
    assert (principal.kind, principal.scopes) == ("operator", {"admin"})
    for tenant_id, kind in ((tenant, "admin"), (OPERATOR_TENANT, "live")):
        with pytest.raises(InvalidError):
            await api_keys.create(conn, pepper, tenant_id=tenant_id, kind=kind, now=1)
    with pytest.raises(InvalidError):
        await api_keys.create(conn, pepper, tenant_id=tenant, now=1, scopes=["chat", "admin"])


async def test_only_the_exact_key_under_the_right_pepper_resolves(conn, tenant, pepper):
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    unknown = credentials.generate("live")
    forged = _with_new_secret(key.value)
    for value in (unknown, forged, key.value[:-1], key.value.replace("live", "test"), "", "sk-123"):
        assert await principals.resolve(conn, pepper, value, 2) is None
    assert await principals.resolve(conn, b"other" * 8, key.value, 2) is None


def _with_new_secret(value: str) -> str:
    """Right id, right checksum, wrong secret: what only the database can refuse."""
    from accounting.access.credentials import _checksum

    body = "_".join([*value.split("_")[:3], "A" * 43])
    return f"{body}_{_checksum(body)}"


async def test_expired_and_revoked_keys_resolve_to_nothing(conn, tenant, pepper):
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1, expires_at=10)
    assert await principals.resolve(conn, pepper, key.value, 9) is not None
    assert await principals.resolve(conn, pepper, key.value, 10) is None
    epoch = await auth_epoch.auth_epoch(conn)
    await api_keys.revoke(conn, tenant, key.info.id, now=5)
    assert await auth_epoch.auth_epoch(conn) == epoch + 1
    assert await principals.resolve(conn, pepper, key.value, 6) is None
    with pytest.raises(NotFoundError):
        await api_keys.revoke(conn, tenant, key.info.id, now=7)


async def test_a_principal_knows_that_its_tenant_is_suspended_or_archived(conn, tenant, pepper):
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    for change, status in (
        (tenant_status.suspend(conn, tenant, True, now=2), "suspended"),
        (tenant_status.archive(conn, tenant, now=3), "archived"),
    ):
        await change
        assert (await principals.resolve(conn, pepper, key.value, 4)).tenant_status == status


async def test_the_secret_is_stored_as_a_keyed_hash_only(conn, tenant, pepper):
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    row = (await conn.execute(select(ApiKey.__table__))).one()
    secret = key.value.split("_")[3]
    assert secret not in str(row)
    assert row.hash == credentials.keyed_hash(pepper, key.value)
    assert key.info.redacted_value == f"hg_live_{key.info.public_id}_***"


async def test_another_tenants_key_is_not_found(conn, tenant, pepper):
    other = (await tenants.create(conn, "b", now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    for call in (
        api_keys.get(conn, other, key.info.id),
        api_keys.revoke(conn, other, key.info.id, now=2),
        api_keys.change(conn, other, key.info.id, KeyChanges(), now=2),
    ):
        with pytest.raises(NotFoundError):
            await call


async def test_scopes_and_expiry_change_until_the_key_has_expired(conn, tenant, pepper):
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    changed = await api_keys.change(conn, tenant, key.info.id, KeyChanges(scopes=("chat",), expires_at=9), now=2)
    assert (changed.scopes, changed.expires_at) == ({"chat"}, 9)
    unlimited = await api_keys.change(conn, tenant, key.info.id, KeyChanges(scopes=()), now=3)
    assert unlimited.scopes == api_keys.ALL_OF_TENANT
    with pytest.raises(InvalidError):
        await api_keys.change(conn, tenant, key.info.id, KeyChanges(expires_at=100), now=9)


async def test_last_use_is_noted_to_the_minute_and_never_goes_back(conn, tenant, pepper):
    key = (await api_keys.create(conn, pepper, tenant_id=tenant, now=1)).info
    epoch = await auth_epoch.auth_epoch(conn)
    seen = []
    for at in (1000, 1030, 1060, 500):
        await api_keys.touch(conn, {key.id: at})
        seen.append((await api_keys.get(conn, tenant, key.id)).last_used_at)
    assert seen == [1000, 1000, 1060, 1060]
    assert await auth_epoch.auth_epoch(conn) == epoch


@pytest.fixture
async def batch(conn, tenant, pepper) -> str:
    """The submitting key's value; the batch is `batch_1`."""
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1, models=["m"])
    await conn.execute(
        insert(File).values(
            id="file-1",
            tenant_id=tenant,
            purpose="batch",
            name="x",
            num_bytes=1,
            sha256="",
            storage_key="",
            created_at=1,
        )
    )
    await conn.execute(
        insert(Batch).values(
            id="batch_1",
            tenant_id=tenant,
            key_id=key.info.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            input_file_id="file-1",
            state="in_progress",
            created_at=1,
            expires_at=100,
        )
    )
    return key.info.id


async def test_a_batchs_credential_is_the_submitting_key_while_the_batch_runs(conn, tenant, pepper, batch):
    credential = credentials.batch_credential(pepper, "batch_1")
    principal = await principals.resolve(conn, pepper, credential, 2)
    assert (principal.kind, principal.batch_id) == ("batch", "batch_1")
    assert (principal.tenant_id, principal.key_id, principal.models) == (tenant, batch, {"m"})
    for state, lives in (("finalizing", True), ("cancelling", False), ("completed", False)):
        await conn.execute(update(Batch).values(state=state))
        assert (await principals.resolve(conn, pepper, credential, 2) is not None) == lives


async def test_a_batchs_credential_never_manages_keys(conn, tenant, pepper, batch):
    await api_keys.change(conn, tenant, batch, KeyChanges(scopes=("batch", "keys")), now=2)
    principal = await principals.resolve(conn, pepper, credentials.batch_credential(pepper, "batch_1"), 3)
    assert principal is not None
    assert principal.scopes == {"batch"}


async def test_revoking_the_key_ends_its_batches_credential(conn, tenant, pepper, batch):
    await api_keys.revoke(conn, tenant, batch, now=2)
    credential = credentials.batch_credential(pepper, "batch_1")
    assert await principals.resolve(conn, pepper, credential, 3) is None


async def test_a_forged_batch_credential_resolves_to_nothing(conn, tenant, pepper, batch):
    genuine = credentials.batch_credential(pepper, "batch_1")
    for value in (genuine[:-1] + "x", "hg_batch_1_", "hg_batch_", credentials.batch_credential(b"x", "batch_1")):
        assert await principals.resolve(conn, pepper, value, 2) is None
