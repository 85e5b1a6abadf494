"""The screen of the caches, its published prefixes, and the purge of a tenant's cache."""

from __future__ import annotations

import re
from html import unescape

from console_pages import signed_in
from fakes import ScriptedWorker, decode
from gateways import MODEL, RunningGateway, until

from gateway.generation.prefixes import PREFIXES
from gateway.generation.stream import GENERATION

LONG = "A system prompt that is long enough for whole groups of sixty-four tokens, said twice. " * 2
PROBE = "<script>alert(1)</script>\"'"
FORMULA = "=cmd|' /C calc'!A0"


async def test_hits_blocks_and_beginnings_of_prompts_are_shown_and_a_tenant_is_purged(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    async with gateway.client() as client:
        for _ in range(2):
            await client.completions.create(model=MODEL, prompt=LONG, max_tokens=1)
    await gateway.settled()
    link, tenant_id = gateway.app[GENERATION].fleet.links[0], gateway.keys.tenant_id
    await until(lambda: link.report.tenants)
    async with gateway.session(gateway.keys.admin_key) as http, http.get("/admin/v1/cache") as answer:
        found = await answer.json()
    (tenant,) = found["tenants"]
    assert (tenant["project_id"], tenant["num_requests"]) == (tenant_id, 2)
    assert tenant["prompt_tokens"] == 2 * len(LONG)
    size = worker.runner.block_size
    assert tenant["cached_tokens"] == (len(LONG) - 1) // size * size
    assert tenant["blocks"] == worker.engine.cache.usage(tenant_id).num_blocks > 0
    (beginning,) = found["prefixes"]
    assert (beginning["num_requests"], beginning["cached_tokens"]) == (2, tenant["cached_tokens"])

    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        page = await operator.get("/cache")
        assert tenant_id in page.words
        assert beginning["hash"] in page.words
        exported = (await operator.get("/cache?table=prefixes&format=csv")).text
        assert exported.splitlines()[1].startswith(f'"{beginning["hash"]}","{MODEL}","a tenant\'s own",2,')
        assert (await operator.get("/cache/purge?project_id=proj_nobody")).status == 404
        assert "Purge the cache of default" in (await operator.get(f"/cache/purge?project_id={tenant_id}")).words
        page = await operator.submit(f"/cache/tenants/{tenant_id}/purge")
        assert (page.status, "is being dropped on 1 workers" in page.words) == (200, True)
        await until(lambda: worker.engine.cache.usage(tenant_id).num_blocks == 0)


async def test_a_prefix_is_published_and_deleted_and_a_refused_form_keeps_its_values(gateway: RunningGateway) -> None:
    path = "/cache/prefixes"
    async with signed_in(gateway, gateway.keys.admin_key) as operator:
        assert "No prefix is published" in (await operator.get(path)).words
        page = await operator.submit(
            path, model="none" + PROBE, kind="text", name=FORMULA + PROBE, text=PROBE, ttl_s="x"
        )
        assert (page.status // 100, 'role="alert"' in page.text, "<script>alert" in page.text) == (4, True, False)
        assert f'value="{FORMULA + PROBE}"' in unescape(page.text)
        lines = LONG + "\r\nAnswer in one line.\r\n" + LONG
        for kind in ("system", "text"):
            page = await operator.submit(path, model=MODEL, kind=kind, name=FORMULA + PROBE, text=lines, ttl_s="600")
            assert (page.status, "<script>alert" in page.text) == (200, False)
        stored = [decode(info.tokens) for info in gateway.app[PREFIXES].of(MODEL)]
        assert min(len(text) for text in stored) >= len(lines.strip()) - 2
        assert all("\nAnswer" in text and "\r" not in text for text in stored)
        exported = (await operator.get(f"{path}?format=csv")).text
        assert ",\"'=cmd|" in exported, "a spreadsheet takes the name for a formula"
        prefix_id = re.search(r"prefix_[0-9a-z]+", page.text)[0]
        async with signed_in(gateway) as tenant:
            assert (await tenant.get(path)).status == 403
            assert (await tenant.submit(f"{path}/{prefix_id}/delete")).status == 403
        await operator.get(path)
        page = await operator.submit(f"{path}/{prefix_id}/delete")
        assert (page.status, prefix_id in page.text) == (200, False)
        assert (await operator.submit(f"{path}/{prefix_id}/delete")).status == 404
