from __future__ import annotations

import pytest
from sqlalchemy import select

from accounting.access import api_keys, service_accounts
from accounting.database import auth_epoch
from accounting.lifecycle import tenant_status
from accounting.tables.models import AuditLog
from accounting.tenants import tenants
from accounting.values.errors import ConflictError, InvalidError, NameTakenError, NotFoundError
from accounting.values.tenant_types import ModelLimits
from accounting.values.types import DEFAULT_MODEL_LIMITS, Limits


async def test_tenants_are_listed_newest_first_page_by_page(conn):
    ids = [(await tenants.create(conn, f"t{n}", now=n // 2)).id for n in range(5)]
    seen, after = [], None
    while True:
        page = await tenants.list_tenants(conn, after=after, limit=2)
        seen += [tenant.id for tenant in page.items]
        if not page.has_more:
            break
        after = seen[-1]
    assert len(seen) == 5
    assert set(seen) == set(ids)
    assert seen[0] == ids[4]
    assert seen[1:3] == sorted(ids[2:4], reverse=True)


async def test_the_operators_own_tenant_is_neither_listed_nor_found(conn):
    assert (await tenants.list_tenants(conn)).items == []
    with pytest.raises(NotFoundError):
        await tenants.get(conn, "operator")
    with pytest.raises(InvalidError):
        await tenants.list_tenants(conn, after="operator")


async def test_archiving_is_final_and_leaves_the_tenant_readable(conn):
    tenant = await tenants.create(conn, "a", now=1)
    archived = await tenant_status.archive(conn, tenant.id, now=2)
    assert (archived.status, archived.archived_at) == ("archived", 2)
    assert await tenant_status.archive(conn, tenant.id, now=3) == archived
    assert (await tenants.list_tenants(conn)).items == []
    assert (await tenants.list_tenants(conn, include_archived=True)).items == [archived]
    with pytest.raises(ConflictError):
        await tenants.rename(conn, tenant.id, "b", now=4)
    with pytest.raises(ConflictError):
        await service_accounts.create_service_account(conn, tenant.id, "x", now=4)


@pytest.mark.parametrize("name", [" acme", "acme ", "\u00a0acme\u3000"])
async def test_a_name_with_spaces_at_its_ends_is_the_name_without_them(conn, name):
    """Both stood in lists, and nobody saw which was which."""
    first = await tenants.create(conn, name, now=1)
    assert first.name == "acme"
    other = await tenants.create(conn, "other", now=2)
    for taken in (tenants.create(conn, name, now=3), tenants.rename(conn, other.id, name, now=3)):
        async with conn.begin_nested() as undone:
            with pytest.raises(NameTakenError):
                await taken
            await undone.rollback()
    assert (await tenants.rename(conn, other.id, " a b ", now=4)).name == "a b"
    with pytest.raises(InvalidError, match="as ids do"):
        await tenants.create(conn, " proj_1", now=5)
    account = await service_accounts.create_service_account(conn, first.id, " robot ", now=6)
    assert account.name == "robot"


async def test_every_change_raises_the_epoch_and_is_audited(conn):
    epochs = [await auth_epoch.auth_epoch(conn)]
    tenant = await tenants.create(conn, "a", now=1, actor="key_admin")
    account = await service_accounts.create_service_account(conn, tenant.id, "x", now=2)
    steps = (
        tenants.rename(conn, tenant.id, "b", now=3),
        tenants.set_limits(conn, tenant.id, Limits(1, 2, 3), now=4),
        tenants.set_model_limits(conn, tenant.id, ModelLimits("m", Limits(1), 7), now=5),
        tenant_status.suspend(conn, tenant.id, True, now=6),
        service_accounts.rename_service_account(conn, tenant.id, account.id, "y", now=7),
        service_accounts.delete_service_account(conn, tenant.id, account.id, now=8),
        tenant_status.archive(conn, tenant.id, now=9),
    )
    for step in steps:
        epochs.append(await auth_epoch.auth_epoch(conn))
        await step
    epochs.append(await auth_epoch.auth_epoch(conn))
    assert epochs == sorted(set(epochs))
    events = (await conn.execute(select(AuditLog.event, AuditLog.actor).order_by(AuditLog.id))).all()
    assert [tuple(row) for row in events][:2] == [
        ("project.created", "key_admin"),
        ("service_account.created", "system"),
    ]
    assert events[-1].event == "project.archived"
    assert len(events) == 9


async def test_limits_of_a_model_override_the_defaults_and_hold_for_that_model_alone(conn):
    tenant = await tenants.create(conn, "a", now=1)
    mine = ModelLimits("m", Limits(5, 6, None), 7)
    await tenants.set_model_limits(conn, tenant.id, ModelLimits("m", Limits(1), None), now=2)
    await tenants.set_model_limits(conn, tenant.id, mine, now=3)
    assert await tenants.model_limits(conn, tenant.id) == {"m": mine}
    assert tenants.default_limits("n").limits == DEFAULT_MODEL_LIMITS
    assert (await tenants.set_limits(conn, tenant.id, Limits(1, 2, 3), now=4)).limits == Limits(1, 2, 3)


async def test_deleting_a_service_account_revokes_its_keys(conn, pepper):
    tenant = await tenants.create(conn, "a", now=1)
    account = await service_accounts.create_service_account(conn, tenant.id, "x", now=1)
    mine = await api_keys.create(conn, pepper, tenant_id=tenant.id, now=1, service_account_id=account.id)
    other = await api_keys.create(conn, pepper, tenant_id=tenant.id, now=1)
    await service_accounts.delete_service_account(conn, tenant.id, account.id, now=2)
    assert (await api_keys.list_keys(conn, tenant.id)).items == [other.info]
    assert (await service_accounts.list_service_accounts(conn, tenant.id)).items == []
    with pytest.raises(NotFoundError):
        await api_keys.get(conn, tenant.id, mine.info.id)
    with pytest.raises(NotFoundError):
        await service_accounts.get_service_account(conn, tenant.id, account.id)


async def test_another_tenants_service_account_is_not_found(conn):
    one, two = [await tenants.create(conn, name, now=1) for name in "ab"]
    account = await service_accounts.create_service_account(conn, one.id, "x", now=1)
    with pytest.raises(NotFoundError):
        await service_accounts.get_service_account(conn, two.id, account.id)


@pytest.mark.parametrize("name", ["", "   ", "x" * 201])
async def test_a_name_must_say_something(conn, name):
    with pytest.raises(InvalidError):
        await tenants.create(conn, name, now=1)
