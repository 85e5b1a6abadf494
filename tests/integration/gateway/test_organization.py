"""The admin surface through the real `openai` client, unmodified, against a real gateway."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest
import pytest_asyncio
from console_pages import signed_in
from gateways import MODEL, PEPPER, running_gateway
from yarl import URL

from accounting.access import api_keys, service_accounts
from accounting.tenants import prefixes
from accounting.values.errors import ConflictError
from gateway.base.app_keys import DATABASE

MODEL_LIMIT = f"rl-{MODEL}"


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_organization(shared_gateway):
    async with shared_gateway.operator() as client:
        yield client.admin.organization


@pytest.mark.asyncio(loop_scope="module")
async def test_a_projects_life(shared_organization):
    made = await shared_organization.projects.create(name="crops")
    assert made.id.startswith("proj_")
    assert (made.object, made.name, made.status) == ("organization.project", "crops", "active")
    assert abs(made.created_at - time.time()) < 60
    assert await shared_organization.projects.retrieve(made.id) == made
    renamed = await shared_organization.projects.update(made.id, name="grain")
    assert (renamed.id, renamed.name) == (made.id, "grain")
    archived = await shared_organization.projects.archive(made.id)
    assert archived.status == "archived"
    assert archived.archived_at is not None
    listed = [project.id async for project in shared_organization.projects.list()]
    assert made.id not in listed
    everything = [p.id async for p in shared_organization.projects.list(include_archived=True)]
    assert made.id in everything
    named = await shared_organization.projects.list(include_archived=True, extra_query={"ids": [made.id, "proj_none"]})
    assert [project.id for project in named.data] == [made.id]
    with pytest.raises(openai.ConflictError):
        await shared_organization.projects.update(made.id, name="again")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("character", ["\n", "\x1b", "\0", "\x7f", "\x9b", "\u202e"])
async def test_no_name_has_a_character_that_nobody_sees(shared_gateway, shared_organization, character):
    name = f"a{character}b"
    project, key = await shared_gateway.new_tenant(f"named {ord(character)}", ["chat", "keys"])
    account = (await shared_organization.projects.service_accounts.create(project, name="robot")).id
    projects = "/v1/organization/projects"
    accounts = f"{projects}/{project}/service_accounts"
    models = {"models": {name: {}}, "url": "http://127.0.0.1:9/v1"}
    rates = [{"model": name, "cache_read": 0, "cache_write": 0, "uncached": 0, "output": 0}]
    for path, body, param in (
        (projects, {"name": name}, "name"),
        (f"{projects}/{project}", {"name": name}, "name"),
        (accounts, {"name": name}, "name"),
        (f"{accounts}/{account}", {"name": name}, "name"),
        (f"{accounts}/{account}/api_keys", {"name": name}, "name"),
        ("/v1/organization/admin_api_keys", {"name": name}, "name"),
        ("/admin/v1/keys", {"name": name, "project_id": project}, "name"),
        ("/v1/keys", {"name": name}, "name"),
        ("/admin/v1/prefixes", {"name": name, "model": MODEL, "token_ids": [5] * 32}, "name"),
        ("/admin/v1/adapters", {"name": name, "model": MODEL, "path": "/adapters/a"}, "name"),
        ("/admin/v1/upstreams", {"name": name, **models}, "name"),
        ("/admin/v1/upstreams", {"name": "up", **models}, "models"),
        ("/admin/v1/upstreams", {"name": "up", **models, "models": {"m": {"name": name}}}, "models"),
        ("/admin/v1/price-sheets", {"sheet": name, "rates": rates}, "sheet"),
        ("/admin/v1/price-sheets", {"sheet": "unseen", "rates": rates}, "rates"),
    ):
        async with (
            shared_gateway.session(key if path == "/v1/keys" else shared_gateway.keys.admin_key) as session,
            session.post(path, json=body) as answer,
        ):
            error = (await answer.json()).get("error")
            assert (answer.status, error and error["param"]) == (400, param), (path, error)


async def test_lists_page_through_the_clients_own_iterator(organization):
    made = [(await organization.projects.create(name=f"p{n}")).id for n in range(5)]
    first = await organization.projects.list(limit=2)
    assert first.has_more
    assert len(first.data) == 2
    seen = [project.id async for project in organization.projects.list(limit=2)]
    assert set(made) <= set(seen)
    assert len(seen) == len(set(seen)) == 6  # with the first start's own


@pytest.mark.asyncio(loop_scope="module")
async def test_a_service_account_comes_with_a_key_that_works_until_it_is_deleted(shared_gateway, shared_organization):
    project = await shared_organization.projects.create(name="wheat")
    accounts = shared_organization.projects.service_accounts
    made = await accounts.create(project.id, name="robot")
    assert (made.role, made.name) == ("member", "robot")
    assert made.api_key.value.startswith("hg_live_")
    assert made.api_key.object == "organization.project.service_account.api_key"
    client = shared_gateway.client(made.api_key.value)
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert [account.id async for account in accounts.list(project.id)] == [made.id]
    assert (await accounts.retrieve(made.id, project_id=project.id)).name == "robot"
    assert (await accounts.update(made.id, project_id=project.id, name="r2")).name == "r2"
    gone = await accounts.delete(made.id, project_id=project.id)
    assert (gone.deleted, gone.object) == (True, "organization.project.service_account.deleted")
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()
    with pytest.raises(openai.NotFoundError):
        await accounts.retrieve(made.id, project_id=project.id)
    await client.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_account_alone_has_role_none_and_no_key(shared_organization):
    project = await shared_organization.projects.create(name="barley")
    accounts = shared_organization.projects.service_accounts
    made = await accounts.create(project.id, name="robot", create_service_account_only=True)
    assert (made.role, made.api_key) == ("none", None)
    assert [key async for key in shared_organization.projects.api_keys.list(project.id)] == []
    with pytest.raises(openai.BadRequestError):
        await accounts.create(project.id, name="x", create_service_account_only=True, expires_in_seconds=60)


@pytest.mark.asyncio(loop_scope="module")
async def test_keys_are_listed_redacted_changed_and_revoked(shared_gateway, shared_organization):
    project = await shared_organization.projects.create(name="oats")
    account = await shared_organization.projects.service_accounts.create(project.id, name="robot")
    made = await shared_organization.projects.service_accounts.api_keys.create(
        account.id, project_id=project.id, name="second", scopes=["chat"], expires_in_seconds=3600
    )
    keys = shared_organization.projects.api_keys
    listed = [key async for key in keys.list(project.id, owner_project_access="active")]
    assert {key.id for key in listed} == {made.id, account.api_key.id}
    shown = await keys.retrieve(made.id, project_id=project.id)
    assert shown.redacted_value == f"hg_live_{made.value.split('_')[2]}_***"
    assert (shown.name, shown.owner.service_account.id) == ("second", account.id)
    assert made.value.split("_")[3] not in shown.to_json()
    changed = await keys.update(made.id, project_id=project.id, expires_in_seconds=60)
    assert changed.expires_at < made.expires_at
    async with shared_gateway.client(made.value) as client:
        await client.models.list()
        gone = await keys.delete(made.id, project_id=project.id)
        assert gone.object == "organization.project.api_key.deleted"
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    with pytest.raises(openai.NotFoundError):
        await keys.retrieve(made.id, project_id=project.id)


@pytest.mark.asyncio(loop_scope="module")
async def test_keys_of_an_archived_project_are_refused_and_none_can_be_made(shared_gateway, shared_organization):
    project = await shared_organization.projects.create(name="rye")
    account = await shared_organization.projects.service_accounts.create(project.id, name="robot")
    await shared_organization.projects.archive(project.id)
    async with shared_gateway.client(account.api_key.value) as client:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await client.models.list()
        assert refused.value.code == "project_archived"
    with pytest.raises(openai.ConflictError):
        await shared_organization.projects.service_accounts.api_keys.create(account.id, project_id=project.id)


@pytest.mark.asyncio(loop_scope="module")
async def test_rate_limits_are_one_per_priced_model_and_change_alone(shared_organization):
    project = await shared_organization.projects.create(name="maize")
    limits = shared_organization.projects.rate_limits
    (entry,) = [entry async for entry in limits.list_rate_limits(project.id)]
    assert (entry.id, entry.model) == (MODEL_LIMIT, MODEL)
    assert (entry.max_requests_per_1_minute, entry.max_tokens_per_1_minute) == (10_000, 10_000_000)
    await limits.update_rate_limit(MODEL_LIMIT, project_id=project.id, max_requests_per_1_minute=7)
    changed = await limits.update_rate_limit(MODEL_LIMIT, project_id=project.id, batch_1_day_max_input_tokens=9)
    assert changed.max_requests_per_1_minute == 7
    assert changed.max_tokens_per_1_minute == 10_000_000
    assert changed.batch_1_day_max_input_tokens == 9
    with pytest.raises(openai.BadRequestError):
        await limits.update_rate_limit(MODEL_LIMIT, project_id=project.id, max_requests_per_1_day=1)
    with pytest.raises(openai.NotFoundError):
        await limits.update_rate_limit("rl-unknown", project_id=project.id, max_requests_per_1_minute=1)


async def test_a_rate_limit_holds_from_the_next_request_on_for_that_project_alone(gateway, organization, worker):
    await gateway.workers(1)

    async def ask(key: str):
        async with gateway.client(key) as client:
            return await client.completions.with_raw_response.create(model=MODEL, prompt="a", max_tokens=1)

    limited, free = [await organization.projects.create(name=name) for name in ("limited", "free")]
    accounts = organization.projects.service_accounts
    keys = [(await accounts.create(p.id, name="robot")).api_key.value for p in (limited, free)]
    first = await ask(keys[0])
    assert first.headers["x-ratelimit-limit-requests"] == "10000"
    await organization.projects.rate_limits.update_rate_limit(
        MODEL_LIMIT, project_id=limited.id, max_requests_per_1_minute=2
    )
    await ask(keys[0])
    with pytest.raises(openai.RateLimitError) as refused:
        await ask(keys[0])
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    await ask(keys[1])


async def test_the_404_for_a_foreign_object_is_that_for_one_that_never_existed(gateway, organization):
    one = await organization.projects.create(name="one")
    two = await organization.projects.create(name="two")
    mine = await organization.projects.service_accounts.create(one.id, name="robot")
    foreign = (
        f"/projects/{two.id}/service_accounts/{mine.id}",
        f"/projects/{two.id}/api_keys/{mine.api_key.id}",
        "/projects/operator",
        f"/projects/{gateway.keys.tenant_id}x",
    )
    never = f"/projects/{two.id}/api_keys/key_{'0' * 32}"
    async with gateway.session(gateway.keys.admin_key) as session:
        bodies = set()
        for path in (*foreign, never):
            for method in ("GET", "DELETE") if "/api_keys/" in path or "accounts" in path else ("GET",):
                async with session.request(method, f"/v1/organization{path}") as answer:
                    assert answer.status == 404
                    bodies.add(await answer.read())
    assert len(bodies) == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "name"),
        ({"name": ""}, "invalid_value", "name"),
        ({"name": 5}, "invalid_type", "name"),
        ({"name": "x", "geography": "EU"}, "unsupported_parameter", "geography"),
        ({"name": "   "}, "invalid_value", "name"),
    ],
)
async def test_a_faulty_body_is_a_400_that_names_the_field(shared_gateway, body, code, param):
    async with (
        shared_gateway.session(shared_gateway.keys.admin_key) as session,
        session.post("/v1/organization/projects", json=body) as answer,
    ):
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (400, code, param)


async def test_scopes_that_no_tenant_key_may_have_are_refused(gateway, organization):
    project = await organization.projects.create(name="crops")
    account = await organization.projects.service_accounts.create(project.id, name="robot")
    for scopes in (["admin"], ["chat", "root"]):
        with pytest.raises(openai.BadRequestError) as refused:
            await organization.projects.service_accounts.api_keys.create(
                account.id, project_id=project.id, scopes=scopes
            )
        assert refused.value.param == "scopes"


async def test_a_tenant_key_reaches_no_admin_route(gateway):
    async with gateway.client() as client:
        for path in ("/organization/projects", f"/organization/projects/{gateway.keys.tenant_id}"):
            with pytest.raises(openai.PermissionDeniedError) as refused:
                await client.get(path, cast_to=object)
            assert refused.value.code == "insufficient_scope"


async def test_writes_are_audited_under_the_acting_key(gateway, organization):
    project = await organization.projects.create(name="crops")
    await organization.projects.service_accounts.create(project.id, name="robot")
    rows = await gateway.sql(
        "SELECT event, actor FROM audit_log WHERE tenant_id = :tenant ORDER BY id", tenant=project.id
    )
    assert [row.event for row in rows] == ["project.created", "service_account.created", "api_key.created"]
    (admin,) = {row.actor for row in rows}
    assert admin.startswith("key_")


async def test_a_key_cannot_be_made_by_an_account_that_is_being_deleted(tmp_path, redis_url, database_url):
    """It was made, lived on without its owner, and the project's keys could not be listed any more."""
    async with running_gateway(tmp_path, redis_url, database_url) as gateway:
        tenant, who = gateway.keys.tenant_id, {"now": int(time.time())}
        async with gateway.app[DATABASE].write() as conn:
            account = await service_accounts.create_service_account(conn, tenant, "robot", **who)
            key = await api_keys.create(
                conn, PEPPER, tenant_id=tenant, service_account_id=account.id, scopes=["keys", "chat"], **who
            )
        async with gateway.session(key.value) as robot, gateway.session(gateway.keys.admin_key) as operator:
            assert (await robot.get("/v1/keys")).status == 200
            async with gateway.app[DATABASE].write() as conn:
                await service_accounts.delete_service_account(conn, tenant, account.id, **who)
                asked = asyncio.create_task(robot.post("/v1/keys", json={}))
                await asyncio.sleep(0.5)
                assert not asked.done()
            assert (await asked).status == 404
            listed = await operator.get(f"/v1/organization/projects/{tenant}/api_keys")
            assert listed.status == 200


async def test_two_prefixes_of_the_same_tokens_are_not_made_at_once(tmp_path, redis_url, database_url):
    how = {"name": "p", "model": MODEL, "tokens": [1, 2, 3], "ttl_s": None, "now": 1, "actor": "a"}
    async with running_gateway(tmp_path, redis_url, database_url) as gateway:

        async def make() -> None:
            async with gateway.app[DATABASE].write() as conn:
                await prefixes.create(conn, **how)

        async with gateway.app[DATABASE].write() as conn:
            await prefixes.create(conn, **how)
            other = asyncio.create_task(make())
            await asyncio.sleep(0.5)
        with pytest.raises(ConflictError):
            await other


async def test_the_same_surface_on_postgresql(tmp_path, redis_url, database_url):
    async with (
        running_gateway(tmp_path, redis_url, database_url) as gateway,
        openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="", admin_api_key=gateway.keys.admin_key, max_retries=0
        ) as client,
    ):
        projects = client.admin.organization.projects
        made = await asyncio.gather(*(projects.create(name=f"p{n}") for n in range(6)))
        account = await projects.service_accounts.create(made[0].id, name="robot")
        keys = [key async for key in projects.api_keys.list(made[0].id)]
        assert [key.id for key in keys] == [account.api_key.id]
        seen = [project.id async for project in projects.list(limit=3)]
        assert {project.id for project in made} <= set(seen)
        # PostgreSQL takes no null character. Neither the API nor a page of the console fails over one.
        async with gateway.session(gateway.keys.admin_key) as admin:
            for path in (
                "/v1/organization/projects/%00",
                "/v1/organization/audit_logs?actor_ids=%00",
                "/admin/v1/batches?after=%00",
            ):
                async with admin.get(URL(path, encoded=True)) as answer:
                    assert answer.status in {200, 400, 404}, (path, await answer.text())
            async with admin.post("/v1/organization/projects", json={"name": "a\0b"}) as answer:
                assert answer.status in {200, 400}, await answer.text()
        async with signed_in(gateway, gateway.keys.admin_key) as operator:
            for path in ("/audit?actor_ids=%00", "/keys?project_id=%00", "/usage?model=%00", "/prices?tenant_id=%00"):
                assert (await operator.get(path)).status in {200, 400, 404}, path
        await refuses_null_characters(gateway, made[0].id)
        await keeps_changes_of_one_moment(gateway, made[0].id)


async def keeps_changes_of_one_moment(gateway, project_id):
    """Changes fields of one profile at one time: all are taken, and none is lost."""
    wanted = {name: f"{name} 1" for name in ("street", "street_more", "city", "region", "phone", "tax_reason")}
    async with gateway.session(gateway.keys.admin_key) as operator:

        async def change(path, name):
            async with operator.patch(path, json={name: wanted[name]}) as answer:
                return answer.status

        for path in ("/admin/v1/issuer", f"/admin/v1/tenants/{project_id}/billing"):
            assert await asyncio.gather(*(change(path, name) for name in wanted)) == [200] * len(wanted)
            async with operator.get(path) as answer:
                assert (await answer.json()).items() >= wanted.items()


async def refuses_null_characters(gateway, project_id):
    """Asks with null characters wherever a statement compares or keeps a client's text. PostgreSQL takes none."""
    null, project = "a\0b", f"/v1/organization/projects/{project_id}"
    bodies = {
        "/v1/organization/projects": {"name": null},
        f"{project}/service_accounts": {"name": null},
        "/admin/v1/budgets": {"project_id": null, "limit_micro_units": 1, "period": "day"},
        "/admin/v1/webhooks": {"url": "https://example.com/", "project_id": null},
        "/v1/batches": {
            "input_file_id": "file-1",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"k": null},
        },
    }
    lists = ("/v1/organization/projects?after=%00", "/v1/organization/costs?start_time=1&project_ids=%00")
    objects = ("/admin/v1/tenants/%00", "/admin/v1/budgets/a%00", "/admin/v1/webhooks/%00/deliveries")
    async with gateway.session(gateway.keys.admin_key) as operator, gateway.session() as tenant:
        for path, body in bodies.items():
            session = tenant if path == "/v1/batches" else operator
            async with session.post(path, json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_value"), path
        for path in lists:
            async with operator.get(path) as answer:
                assert answer.status == 400, path
        for session, paths in ((operator, objects), (tenant, ("/v1/batches/%00", "/v1/files/a%00/content"))):
            for path in paths:
                async with session.get(path) as answer:
                    assert answer.status == 404, path
        async with operator.post("/v1/organization/projects", json={"name": r"a\u0000"}) as answer:
            assert answer.status == 200  # six characters, none of them null


async def test_a_finance_key_is_made_reads_everything_and_changes_nothing(gateway, organization):
    made = await organization.admin_api_keys.create(name="finance", extra_body={"scopes": ["admin:read"]})
    assert made.value.startswith("hg_admin_")
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="", admin_api_key=made.value, max_retries=0
    ) as client:
        finance = client.admin.organization
        assert [project.name async for project in finance.projects.list()] == ["default"]
        listed = {key.id: key async for key in finance.admin_api_keys.list()}
        assert listed[made.id].model_dump()["scopes"] == ["admin:read"]
        assert "value" not in listed[made.id].model_dump()
        for forbidden in (
            finance.projects.create(name="crops"),
            finance.admin_api_keys.create(name="more"),
            finance.admin_api_keys.delete(made.id),
        ):
            with pytest.raises(openai.PermissionDeniedError):
                await forbidden
    assert (await organization.admin_api_keys.retrieve(made.id)).name == "finance"
    await organization.admin_api_keys.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await organization.admin_api_keys.retrieve(made.id)
    with pytest.raises(openai.BadRequestError):
        await organization.admin_api_keys.create(name="x", extra_body={"scopes": ["chat"]})
