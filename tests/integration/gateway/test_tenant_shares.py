"""What the operator lets each tenant keep on a worker, from the admin API and the command line to the worker's blocks."""

from __future__ import annotations

import asyncio
import time

import pytest
from click.testing import CliRunner
from gateways import MODEL, PEPPER, until

from accounting.access import api_keys
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main

BLOCK = 16
LONG = "the water runs down to the field. " * 14  # 30 blocks
PATH = "/admin/v1/tenants"


async def call(gateway, method, path, body=None, key=None):
    async with gateway.session(key or gateway.keys.admin_key) as session:
        answer = await session.request(method, path, json=body)
        return answer.status, await answer.json()


async def change(gateway, tenant, **fields):
    status, changed = await call(gateway, "PATCH", f"{PATH}/{tenant}", fields)
    assert status == 200, changed
    return changed


async def ask(gateway, key, prompt=LONG, **fields):
    """(cached blocks, why no more)."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1} | fields
    status, answer = await call(gateway, "POST", "/v1/completions", body, key)
    assert status == 200, answer
    report = answer["headgate"]["cache"]
    return report["cached_tokens"] // BLOCK, report["miss_reason"]


async def sweep(gateway, key):
    """More long prompts than the pool holds, no two with a beginning in common."""
    for number in range(12):
        await ask(gateway, key, f"{number:02} " + LONG)


async def test_one_tenants_sweep_cannot_evict_anothers_floor(gateway, worker):
    anna, anna_key = await gateway.new_tenant("anna")
    _, bert_key = await gateway.new_tenant("bert")
    await change(gateway, anna, cache_floor_blocks=30)
    await ask(gateway, anna_key)
    await sweep(gateway, bert_key)
    assert await ask(gateway, anna_key) == (len(LONG) // BLOCK, "below_block")
    assert worker.engine.cache.counts.num_floor_breaches == 0

    # The control: the same sweep without the floor.
    await change(gateway, anna, cache_floor_blocks=None)
    await ask(gateway, anna_key)
    await sweep(gateway, bert_key)
    assert await ask(gateway, anna_key) == (0, "evicted")


async def test_above_its_quota_a_tenant_evicts_its_own_and_then_keeps_no_more(gateway, worker):
    anna, anna_key = await gateway.new_tenant("anna")
    await change(gateway, anna, cache_quota_blocks=10)
    await ask(gateway, anna_key)
    assert (await ask(gateway, anna_key))[0] == 10
    other = "another " + LONG
    await ask(gateway, anna_key, other)
    assert (await ask(gateway, anna_key, other))[0] == 10
    assert (await ask(gateway, anna_key)) == (0, "evicted")
    assert worker.engine.cache.usage(anna).num_blocks == 10
    assert worker.engine.cache.counts.num_refused_inserts > 0


async def test_floors_sum_to_sixty_percent_of_the_smallest_worker_at_most(gateway):
    anna, _ = await gateway.new_tenant("anna")
    bert, _ = await gateway.new_tenant("bert")
    assert (await change(gateway, anna, cache_floor_blocks=100))["cache_floor_blocks"] == 100
    status, refused = await call(
        gateway, "PATCH", f"{PATH}/{bert}", {"cache_floor_blocks": 54}
    )  # 255 blocks: 153 in all
    assert (status, refused["error"]["param"]) == (400, "cache_floor_blocks")
    assert (await change(gateway, bert, cache_floor_blocks=53))["cache_floor_blocks"] == 53
    # An archived tenant keeps nothing.
    await call(gateway, "POST", f"/v1/organization/projects/{anna}/archive")
    assert (await change(gateway, bert, cache_floor_blocks=153))["cache_floor_blocks"] == 153


async def test_what_is_absent_stays_and_null_is_the_default(gateway):
    anna, _ = await gateway.new_tenant("anna")
    await change(gateway, anna, weight=2.5, cache_quota_blocks=50, cache_read=False)
    await change(gateway, anna, cache_floor_blocks=20)
    _, found = await call(gateway, "GET", f"{PATH}/{anna}")
    assert (found["weight"], found["cache_quota_blocks"]) == (2.5, 50)
    assert (found["cache_floor_blocks"], found["cache_read"]) == (20, False)
    found = await change(gateway, anna, weight=None, cache_quota_blocks=None, cache_read=None)
    assert (found["weight"], found["cache_quota_blocks"], found["cache_read"]) == (1.0, None, True)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "fields",
    [
        {"weight": 0},
        {"weight": 1000},
        {"weight": 1e308},
        {"cache_floor_blocks": -1},
        {"cache_floor_blocks": 9, "cache_quota_blocks": 8},
        {"cache_ttl_s": 3601},
        {"cache_write": "no"},
    ],
)
async def test_a_share_that_makes_no_sense_is_refused(shared_gateway, fields):
    anna, _ = await shared_gateway.new_tenant("anna")
    assert (await call(shared_gateway, "PATCH", f"{PATH}/{anna}", fields))[0] == 400


async def test_without_a_worker_no_floor_can_be_promised(bare_gateway):
    anna, _ = await bare_gateway.new_tenant("anna")
    path = f"{PATH}/{anna}"
    assert (await call(bare_gateway, "PATCH", path, {"cache_floor_blocks": 1}))[0] == 409
    assert (await call(bare_gateway, "PATCH", path, {"weight": 2}))[0] == 200


async def test_a_purged_tenant_finds_nothing_and_its_neighbour_everything(gateway):
    anna, anna_key = await gateway.new_tenant("anna")
    _, bert_key = await gateway.new_tenant("bert")
    await ask(gateway, anna_key)
    await ask(gateway, bert_key)
    status, purged = await call(gateway, "POST", f"{PATH}/{anna}/purge-cache")
    assert (status, purged["num_workers"]) == (200, 1)
    assert await ask(gateway, anna_key) == (0, "cold")
    assert (await ask(gateway, bert_key))[0] == len(LONG) // BLOCK


async def test_an_archived_tenant_leaves_no_block_behind(gateway, worker):
    anna, anna_key = await gateway.new_tenant("anna")
    await ask(gateway, anna_key)
    assert worker.engine.cache.usage(anna).num_blocks > 0
    await call(gateway, "POST", f"/v1/organization/projects/{anna}/archive")
    await until(lambda: worker.engine.cache.usage(anna).num_blocks == 0)


async def test_reading_and_writing_are_switched_off_apart(gateway):
    anna, key = await gateway.new_tenant("anna")
    await change(gateway, anna, cache_write=False)
    await ask(gateway, key)
    assert await ask(gateway, key) == (0, "cold")
    await change(gateway, anna, cache_write=True)
    await ask(gateway, key)
    await change(gateway, anna, cache_read=False)
    assert await ask(gateway, key) == (0, "opt_out")
    await change(gateway, anna, cache_read=True)
    assert (await ask(gateway, key))[0] == len(LONG) // BLOCK


@pytest.mark.parametrize("isolation", ["tenant", "key", "end_user"])
async def test_keys_and_end_users_of_a_tenant_meet_each_others_prompts_only_if_it_wants_so(gateway, isolation):
    """Who could meet a prompt could also tell from the time to the first token that somebody sent it."""
    tenant, key = await gateway.new_tenant("anna")
    async with gateway.app[DATABASE].write() as conn:
        other_key = (await api_keys.create(conn, PEPPER, tenant_id=tenant, now=int(time.time()))).value
    await change(gateway, tenant, cache_isolation=isolation)
    whole = len(LONG) // BLOCK
    assert await ask(gateway, key, user="customer 1") == (0, "cold")
    assert (await ask(gateway, key, user="customer 1"))[0] == whole
    assert (await ask(gateway, key, user="customer 2"))[0] == (0 if isolation == "end_user" else whole)
    assert (await ask(gateway, key))[0] == (0 if isolation == "end_user" else whole)
    assert (await ask(gateway, other_key, user="customer 1"))[0] == (whole if isolation == "tenant" else 0)


async def test_prompts_with_a_time_to_live_are_pinned_as_far_as_the_budget_goes(gateway, worker):
    anna, key = await gateway.new_tenant("anna")
    _, bert_key = await gateway.new_tenant("bert")
    await change(gateway, anna, cache_ttl_s=60)
    await ask(gateway, key)
    retention = worker.engine.cache.retention
    assert worker.engine.cache.num_pinned == retention.tenant_limit == 6
    await sweep(gateway, bert_key)
    assert await ask(gateway, key) == (6, "evicted")


async def test_the_command_line_sets_shares_and_purges(gateway, worker):
    anna, key = await gateway.new_tenant("anna")

    async def headgate(*arguments):
        home = ["--home", str(gateway.settings.home)]
        env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
        command = ["tenants", *arguments, *home]
        done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
        assert done.exit_code == 0, done.output
        return done.output

    said = await headgate("set", "anna", "--weight", "3", "--cache-quota-blocks", "40")
    assert "40" in said
    await headgate("set", "anna", "--cache-quota-blocks", "none", "--no-cache-read")
    _, found = await call(gateway, "GET", f"{PATH}/{anna}")
    assert (found["weight"], found["cache_quota_blocks"], found["cache_read"]) == (3.0, None, False)
    await ask(gateway, key)
    assert (await headgate("purge-cache", "anna")).strip() == "1"
    await until(lambda: worker.engine.cache.usage(anna).num_blocks == 0)
