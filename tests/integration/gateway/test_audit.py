"""Every change leaves its row in the audit log, and the log answers through the unmodified client."""

from __future__ import annotations

import json
import time
from typing import Any

import bills_world
import openai
import pytest
from aiohttp import FormData
from billing_world import PERIOD, used
from gateways import MODEL, RunningGateway, running_gateway

from accounting.lifecycle import erasure
from gateway.app import api_routes
from gateway.base.app_keys import DATABASE

RUNS_A_MODEL = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /tokenize",
    "POST /detokenize",
    "POST /v1/quotes",
    "POST /v1/batches/estimate",
    "POST /admin/v1/verify-books",
    "POST /admin/v1/price-sheets/preview",
    "POST /admin/v1/tenants/{tenant_id}/limits/preview",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "POST /admin/v1/upstreams/{upstream}/check",
    "POST /v1/rerank",
    "POST /v1/score",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/responses/compact",
    "POST /v1/responses/{response_id}/run",
    # Stored answers are the tenant's own, as many as its requests, and the request log names them.
    "POST /v1/responses/{response_id}/cancel",
    "DELETE /v1/responses/{response_id}",
}
"""No state but the books."""
PERSONAL = ("audit_log", "file", "spend_alert", "batch", "tenant", "service_account", "api_key")
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url, retention_days=0) as running:
        yield running


class Operator:
    """Calls routes by their name and remembers which."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._gateway = gateway
        self.called: set[str] = set()
        self.database = gateway.app[DATABASE]

    async def call(self, name: str, body: Any = None, key: str | None = None, *, once: str = "", **parts: str) -> Any:
        method, path = name.split(" ")
        before = await self._gateway.sql("SELECT coalesce(max(id), 0) AS n FROM audit_log")
        options = {"data": body} if isinstance(body, FormData) else {"json": body}
        if once:
            options["headers"] = {"idempotency-key": once}
        async with (
            self._gateway.session(key or self._gateway.keys.admin_key) as session,
            session.request(method, path.format(**parts), **options) as answer,
        ):
            assert answer.status == 200, (name, await answer.text())
            value = await answer.json()
        rows = await self._gateway.sql("SELECT event, actor FROM audit_log WHERE id > :n", n=before[0].n)
        assert rows, f"{name} wrote no audit row"
        assert all(row.actor.startswith("key_") for row in rows)
        self.called.add(name)
        return value

    async def ends(self, message_batch: str) -> None:
        """Ends a batch of messages, as a jobs process would."""
        async with self._gateway.app[DATABASE].write() as conn:
            rows = await conn.exec_driver_sql("SELECT id FROM batch ORDER BY created_at DESC, id DESC LIMIT 1")
            await conn.exec_driver_sql("UPDATE batch SET state = 'cancelled' WHERE id = ?", (rows.scalar_one(),))


async def test_every_route_that_changes_something_writes_an_audit_row(gateway):
    """A new route that changes state must be called here."""
    operator = Operator(gateway)
    await change_projects(operator)
    await change_keys(operator, gateway)
    await change_spending(operator, gateway.keys.tenant_id)
    await change_budgets(operator, gateway.keys.tenant_id)
    await change_billing(operator, await used(gateway))
    await change_models(operator)
    await change_webhooks(operator)
    await change_webhooks(operator, (await gateway.new_tenant("hooks", ("keys", "usage:read")))[1])
    await change_files_and_batches(operator, gateway.keys.api_key)
    changing = {f"{route.method} {route.path}" for route in api_routes() if route.method != "GET"} - RUNS_A_MODEL
    of_workers = {f"POST /admin/v1/workers/{{worker_id}}/{verb}" for verb in ("drain", "resume")}
    assert changing - operator.called == of_workers, "they need a worker, and have a test"


async def change_keys(operator: Operator, gateway: RunningGateway) -> None:
    admins = "/v1/organization/admin_api_keys"
    finance = await operator.call(f"POST {admins}", {"name": "finance", "scopes": ["admin:read"]})
    await operator.call(f"DELETE {admins}/{{key_id}}", key_id=finance["id"])
    tenant, key = await gateway.new_tenant("keeper", scopes=["keys", "chat"])
    for root, asker, more in (("/v1/keys", key, {}), ("/admin/v1/keys", None, {"project_id": tenant})):
        made = await operator.call(f"POST {root}", {"name": "robot", "scopes": ["chat"]} | more, asker)
        at = {"key_id": made["id"]}
        await operator.call(f"PATCH {root}/{{key_id}}", {"disabled": True}, asker, **at)
        await operator.call(f"POST {root}/{{key_id}}/rotate", {}, asker, **at)
        await operator.call(f"DELETE {root}/{{key_id}}", None, asker, **at)


async def change_projects(operator: Operator) -> None:
    projects = "/v1/organization/projects"
    project = (await operator.call(f"POST {projects}", {"name": "crops"}))["id"]
    one = f"{projects}/{{project_id}}"
    await operator.call(f"POST {one}", {"name": "fields"}, project_id=project)
    account = await operator.call(f"POST {one}/service_accounts", {"name": "robot"}, project_id=project)
    at = {"project_id": project, "account_id": account["id"]}
    accounts = f"{one}/service_accounts/{{account_id}}"
    await operator.call(f"POST {accounts}", {"name": "tractor"}, **at)
    key = (await operator.call(f"POST {accounts}/api_keys", {}, **at))["id"]
    at |= {"key_id": key}
    await operator.call(f"POST {one}/api_keys/{{key_id}}", {"scopes": ["chat"]}, **at)
    await operator.call("PATCH /admin/v1/keys/{key_id}", {"disabled": True}, key_id=key)
    await operator.call("POST /admin/v1/keys/{key_id}/rotate", {}, key_id=key)
    await operator.call("POST /admin/v1/leaked-keys", {"value": account["api_key"]["value"]})
    await operator.call(f"DELETE {one}/api_keys/{{key_id}}", **at)
    await operator.call(f"DELETE {accounts}", **at)
    await operator.call(
        f"POST {one}/rate_limits/{{rate_limit_id}}",
        {"max_requests_per_1_minute": 5},
        project_id=project,
        rate_limit_id=f"rl-{MODEL}",
    )
    models = {"mode": "allow_list", "model_ids": [MODEL]}
    await operator.call(f"POST {one}/model_permissions", models, project_id=project)
    await operator.call(f"DELETE {one}/model_permissions", project_id=project)
    tenant = "/admin/v1/tenants/{tenant_id}"
    await operator.call(f"PATCH {tenant}", {"suspended": True}, tenant_id=project)
    await operator.call(f"POST {tenant}/purge-cache", tenant_id=project)
    await operator.call(f"POST {one}/archive", project_id=project)
    await operator.call(f"DELETE {tenant}", tenant_id=project)


async def change_spending(operator: Operator, project: str) -> None:
    terms = {"threshold_amount": 500, "currency": "USD", "interval": "month"}
    alert = terms | {"notification_channel": {"type": "email", "recipients": ["ops@example.org"]}}
    for root in ("/v1/organization/projects/{project_id}", "/v1/organization"):
        at = {"project_id": project}
        await operator.call(f"POST {root}/spend_limit", terms, **at)
        await operator.call(f"DELETE {root}/spend_limit", **at)
        made = await operator.call(f"POST {root}/spend_alerts", alert, **at)
        at["alert_id"] = made["id"]
        await operator.call(f"POST {root}/spend_alerts/{{alert_id}}", alert, **at)
        await operator.call(f"DELETE {root}/spend_alerts/{{alert_id}}", **at)


async def change_budgets(operator: Operator, project: str) -> None:
    budgets, one = "/admin/v1/budgets", "/admin/v1/budgets/{budget_id}"
    wanted = {"project_id": project, "period": "day", "limit_micro_units": 5}
    at = {"budget_id": (await operator.call(f"POST {budgets}", wanted))["id"]}
    await operator.call(f"PATCH {one}", {"limit_micro_units": 6}, **at)
    now = int(time.time())
    more = {"micro_units": 1, "from": now, "to": now + 60}
    await operator.call(f"POST {one}/adjustments", more, **at)
    await operator.call(f"DELETE {one}", **at)
    quota = {"project_id": project, "level": "tenant", "dimension": "requests_per_day", "limit": 9}
    await operator.call("POST /admin/v1/quotas", quota)


async def change_billing(operator: Operator, tenant: str) -> None:
    rates = [{"model": MODEL, "cache_read": 1, "cache_write": 2, "uncached": 3, "output": 4}]
    await operator.call("POST /admin/v1/price-sheets", {"sheet": "gold", "rates": rates})
    assigned = {"sheet": "gold"}
    await operator.call("PUT /admin/v1/tenants/{tenant_id}/price-sheet", assigned, tenant_id=tenant)
    grant = {"type": "grant", "project_id": tenant, "amount_micro_units": 5}
    await operator.call("POST /admin/v1/credits", grant, once="a grant")
    await operator.call("POST /admin/v1/invoices", {"period": PERIOD, "project_id": tenant})
    await change_documents(operator)


async def change_documents(operator: Operator) -> None:
    owner = await bills_world.tenant(operator.database, "customer", "EUR")
    await operator.call("PATCH /admin/v1/issuer", {"name": "Example Ltd"})
    await operator.call("PATCH /admin/v1/tenants/{tenant_id}/billing", {"city": "Berlin"}, tenant_id=owner)
    made = await operator.call("POST /admin/v1/invoices", {"period": PERIOD, "project_id": owner})
    one = "POST /admin/v1/invoices/{number}"
    await operator.call(f"{one}/payments", {"amount_micro_units": 10_000}, number=made["number"])
    await operator.call(f"{one}/void", {"reason": "wrong address"}, number=made["number"])


async def change_models(operator: Operator) -> None:
    adapter = {"model": MODEL, "name": "poet", "path": "/models/poet"}
    made = await operator.call("POST /admin/v1/adapters", adapter)
    await operator.call("DELETE /admin/v1/adapters/{adapter_id}", adapter_id=made["id"])
    upstream = {"name": "spare", "url": "http://127.0.0.1:9/v1", "models": {"spare": {}}, "cost_credential": "x"}
    await operator.call("POST /admin/v1/upstreams", upstream)
    one = "/admin/v1/upstreams/{upstream}"
    bill = {"rows": [{"id": "row", "amount_micro_units": 1}]}
    await operator.call(f"POST {one}/costs", bill, upstream="spare")
    await operator.call(f"POST {one}/costs/pull", {}, upstream="spare")
    await operator.call(f"DELETE {one}", upstream="spare")
    prefixes = "/admin/v1/prefixes"
    rule = {"role": "system", "content": "a rule " * 20}
    wanted = {"model": MODEL, "messages": [rule]}
    prefix = await operator.call(f"POST {prefixes}", wanted)
    await operator.call(f"DELETE {prefixes}/{{prefix_id}}", prefix_id=prefix["id"])


async def change_webhooks(operator: Operator, tenants_key: str | None = None) -> None:
    webhooks = "/admin/v1/webhooks" if tenants_key is None else "/v1/webhooks"
    one = webhooks + "/{webhook_id}"
    made = await operator.call(f"POST {webhooks}", {"url": "https://example.com/"}, tenants_key)
    await operator.call(f"POST {one}/test", None, tenants_key, webhook_id=made["id"])
    await operator.call(f"DELETE {one}", None, tenants_key, webhook_id=made["id"])


async def change_files_and_batches(operator: Operator, key: str) -> None:
    form = FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(LINE).encode(), filename="in.jsonl")
    file = (await operator.call("POST /v1/files", form, key))["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = (await operator.call("POST /v1/batches", batch, key))["id"]
    await operator.call("POST /v1/batches/{batch}/cancel", None, key, batch=made)
    await operator.call("POST /admin/v1/batches/{batch}/cancel", None, batch=made)
    await operator.call("DELETE /v1/files/{file}", None, key, file=file)
    asked = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    wanted = {"requests": [{"custom_id": "a", "params": asked}]}
    made = (await operator.call("POST /v1/messages/batches", wanted, key))["id"]
    await operator.call("POST /v1/messages/batches/{batch}/cancel", None, key, batch=made)
    await operator.ends(made)
    await operator.call("DELETE /v1/messages/batches/{batch}", None, key, batch=made)


async def test_the_log_is_filtered_and_paged_by_the_clients_own_means(gateway, organization):
    first = await organization.projects.create(name="first")
    second = await organization.projects.create(name="second")
    account = await organization.projects.service_accounts.create(first.id, name="robot")
    await organization.projects.archive(second.id)
    every = [entry async for entry in organization.audit_logs.list(limit=2)]
    assert [entry.type for entry in every][:5] == [
        "project.archived",
        "api_key.created",
        "service_account.created",
        "project.created",
        "project.created",
    ]
    ids = [entry.id for entry in every]
    assert len(set(ids)) == len(ids)

    async def types(**asked: Any) -> list[str]:
        return [entry.type async for entry in organization.audit_logs.list(**asked)]

    assert await types(project_ids=[second.id]) == ["project.archived", "project.created"]
    assert await types(event_types=["project.created"], project_ids=[first.id]) == ["project.created"]
    assert await types(resource_ids=[account.api_key.id]) == ["api_key.created"]
    assert await types(actor_ids=["system"], event_types=["project.archived"]) == []
    assert await types(effective_at={"gt": int(time.time()) + 60}) == []
    assert len(await types(effective_at={"gte": 0, "lte": int(time.time()) + 1})) == len(ids)
    newer = await organization.audit_logs.list(before=ids[2], limit=2)
    assert [entry.id for entry in newer.data] == ids[:2]


async def test_an_entry_has_the_clients_fields_and_no_secret(gateway, organization):
    project = await organization.projects.create(name="crops")
    account = await organization.projects.service_accounts.create(project.id, name="robot")
    [entry] = (await organization.audit_logs.list(event_types=["api_key.created"], project_ids=[project.id])).data
    assert (entry.actor.type, entry.project.id, entry.project.name) == ("api_key", project.id, "crops")
    assert entry.api_key_created.id == account.api_key.id
    assert "chat" in entry.api_key_created.data.scopes
    for value in (account.api_key.value, gateway.keys.admin_key):
        secret = value.split("_")[3]
        rows = await gateway.sql("SELECT detail, actor, object_id FROM audit_log")
        assert not any(secret in str(row) for row in rows)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "asked",
    [
        "effective_at[gt]=x",
        "effective_at[gte]=8&effective_at[lt]=8",
        "effective_at[gt]=7&effective_at[lte]=7",
        "effective_at[gt]=7&effective_at[gte]=3&effective_at[lt]=8",
        "after=nothing",
        "limit=0",
        "actor_emails[]=a@b.c",
        "before=key_1",
    ],
)
async def test_what_cannot_be_asked_of_the_log_is_a_400(shared_gateway, asked):
    async with (
        shared_gateway.session(shared_gateway.keys.admin_key) as session,
        session.get(f"/v1/organization/audit_logs?{asked}") as answer,
    ):
        assert answer.status == 400


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("bounds", ["[gte]=8&effective_at[lte]=8", "[gt]=7&effective_at[lt]=9", "[lt]=1", "[lte]=0"])
async def test_one_second_is_enough_of_a_time_to_ask_the_log_for(bounds, shared_gateway):
    async with (
        shared_gateway.session(shared_gateway.keys.admin_key) as session,
        session.get(f"/v1/organization/audit_logs?effective_at{bounds}") as answer,
    ):
        assert (answer.status, (await answer.json())["data"]) == (200, [])


async def test_a_deleted_tenant_leaves_its_books_and_nothing_to_read(gateway, organization):
    tenant, key = await gateway.new_tenant("leaving")
    form = FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(LINE).encode(), filename="private.jsonl")
    async with gateway.session(key) as session, session.post("/v1/files", data=form) as answer:
        file = (await answer.json())["id"]
    channel = {"type": "email", "recipients": ["person@example.org"]}
    await organization.projects.spend_alerts.create(
        tenant, threshold_amount=1, currency="USD", interval="month", notification_channel=channel
    )
    async with gateway.session(gateway.keys.admin_key) as session:

        async def delete() -> tuple[int, Any]:
            async with session.delete(f"/admin/v1/tenants/{tenant}") as answer:
                return answer.status, await answer.json()

        assert (await delete())[0] == 409
        await organization.projects.archive(tenant)
        status, report = await delete()
        assert (status, report["num_keys"], report["num_files"]) == (200, 1, 1)
        assert report["data_key_destroyed"]
        assert (await delete())[0] == 404
    assert await gateway.sql("SELECT 1 FROM data_key WHERE tenant_id = :t", t=tenant) == []
    [row] = await gateway.sql("SELECT name, deleted_at FROM file WHERE id = :f", f=file)
    assert (row.name, row.deleted_at is not None) == (erasure.ERASED, True)
    left = [str(row) for table in PERSONAL for row in await gateway.sql(f"SELECT * FROM {table}")]
    assert not any("person@" in row or "private.jsonl" in row for row in left)
    with pytest.raises(openai.NotFoundError):
        await organization.projects.retrieve(tenant)
    [gone] = (await organization.audit_logs.list(event_types=["project.deleted"])).data
    assert gone.project.name == erasure.ERASED


async def test_an_archived_tenant_is_kept_as_long_as_the_operator_says(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url, retention_days=30) as gateway:
        tenant, _ = await gateway.new_tenant("leaving")
        async with gateway.session(gateway.keys.admin_key) as session:
            async with session.post(f"/v1/organization/projects/{tenant}/archive") as answer:
                assert answer.status == 200
            async with session.delete(f"/admin/v1/tenants/{tenant}") as answer:
                assert answer.status == 409
                assert "30 days" in (await answer.json())["error"]["message"]


async def test_archiving_cancels_open_batches(gateway, organization):
    tenant, key = await gateway.new_tenant("leaving")
    form = FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(LINE).encode(), filename="in.jsonl")
    async with gateway.client(key) as client, gateway.session(key) as session:
        async with session.post("/v1/files", data=form) as answer:
            file = (await answer.json())["id"]
        batch = await client.batches.create(
            input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await organization.projects.archive(tenant)
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await client.batches.retrieve(batch.id)
        assert refused.value.code == "project_archived"
    [row] = await gateway.sql("SELECT state FROM batch WHERE id = :b", b=batch.id)
    assert row.state == "cancelling"
