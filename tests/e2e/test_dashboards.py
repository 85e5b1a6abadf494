"""Every panel's expression on a real Prometheus that scrapes a running Headgate under mixed load; none is empty."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_server import ROOT, program, running_prometheus
from provider import KEY, declared, running_provider
from running import PATIENT, Server

WINDOW = "10s"
LOAD_S, LIMIT_S, PAUSE_S = 12.0, 60.0, 0.3
SHARED = "You are a helper of the operators of Headgate. You answer in short sentences. " * 8
ACCEPT = "application/openmetrics-text; version=1.0.0"


def expressions() -> list[tuple[str, str]]:
    """(dashboard and title, expression) of each query of the files that Grafana reads."""
    panels = [
        (path.stem, panel)
        for path in sorted((ROOT / "ops" / "grafana").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
    ]
    return [
        (f"{name}: {panel['title']}", query["expr"]) for name, panel in panels for query in panel.get("targets", ())
    ]


def ready_to_run(expression: str) -> str:
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", WINDOW))


@contextlib.contextmanager
def repeated(*works: Callable[[], None]) -> Iterator[None]:
    """Runs each work again and again in a thread of its own, until the block ends."""
    over = threading.Event()

    def run(work: Callable[[], None]) -> None:
        while not over.is_set():
            with contextlib.suppress(openai.InternalServerError):  # a 503 of a busy machine is load, too
                work()
            over.wait(PAUSE_S)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def mixed_load(server: Server) -> tuple[Callable[[], None], ...]:
    _, key = server.tenant_key("streams")
    tenant, budgeted = server.tenant_key("budgeted")
    done = server.command("budgets", "add", tenant, "--limit", "1000.00", "--period", "day")
    assert done.returncode == 0, done.stderr
    streams, budget = server.client(key, max_retries=0), server.client(budgeted, max_retries=0)

    def stream(max_tokens: int) -> None:
        chunks = streams.chat.completions.create(
            model=server.model,
            messages=[{"role": "system", "content": SHARED}, {"role": "user", "content": "What is a lease?"}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert list(chunks)

    def answer() -> None:
        budget.completions.create(model=server.model, prompt="A budget is", max_tokens=8)

    def refused() -> None:
        with pytest.raises(openai.BadRequestError):
            budget.chat.completions.create(
                model=server.model, messages=[{"role": "user", "content": "x"}], max_tokens=8, temperature=9
            )

    bought = server.client(_buyer(server), max_retries=0)

    def buy() -> None:
        bought.chat.completions.create(model="bought", messages=[{"role": "user", "content": "Hello"}], max_tokens=8)

    def leave() -> None:
        chunks = streams.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "Count."}], max_tokens=100, stream=True
        )
        next(iter(chunks))
        chunks.close()

    # The long one is extended beyond its first lease of 128 tokens.
    return partial(stream, 8), partial(stream, 140), answer, refused, leave, buy


def _buyer(server: Server) -> str:
    """The key of a tenant that may buy the upstream's model."""
    tenant, key = server.tenant_key("buys")
    rates = {"cache_read": 100_000, "cache_write": 1_000_000, "uncached": 1_000_000, "output": 2_000_000}
    sheet = {"sheet": "bought", "rates": [{"model": "bought", "tier": "interactive", **rates}]}
    server.admin("POST", "/admin/v1/price-sheets", json=sheet)
    server.admin("PUT", f"/admin/v1/tenants/{tenant}/price-sheet", json={"sheet": "bought"})
    return key


@contextlib.contextmanager
def provider_of_others() -> Iterator[dict]:
    """A provider in a loop of its own; its declaration as an upstream."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = running_provider()
    found = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(10)
    try:
        yield declared(found, costs={"key_env": "PROVIDER_KEY"})
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def submit_batch(server: Server) -> None:
    client = server.client(server.tenant_key("batcher")[1])
    body = {"model": server.model, "messages": [{"role": "user", "content": SHARED}], "max_tokens": 4}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(200)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("work.jsonl", io.BytesIO(content)), purpose="batch")
    client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


@pytest.mark.timeout(240)
def test_no_panel_is_empty_under_mixed_load(start_server, tmp_path):
    program("prometheus")
    wanted = expressions()
    assert len(wanted) > 80
    directory = tmp_path / "prometheus"
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        upstreams = {"mock": stack.enter_context(provider_of_others())}
        variables = {"HEADGATE_UPSTREAMS": json.dumps(upstreams), "PROVIDER_KEY": KEY, "HEADGATE_TRACE_RATIO": "1"}
        server = start_server("--gateways", "2", env=PATIENT | variables)
        prometheus = stack.enter_context(running_prometheus(directory, server.ready["metrics"]))
        works = mixed_load(server)
        began = time.time()
        submit_batch(server)
        with repeated(*works):
            time.sleep(LOAD_S)  # rates need some scrapes
            assert server.admin("POST", "/admin/v1/upstreams/mock/costs/pull", json={})["ok"]
            empty = wanted
            while empty and time.time() < began + LIMIT_S:
                until = time.time()
                empty = [one for one in empty if not prometheus.values(ready_to_run(one[1]), began, until)]
        assert prometheus.unhealthy_targets() == []
        assert not empty, "\n".join(f"{name}: {expression}" for name, expression in empty)
        assert broken_rules(prometheus.get("rules")["groups"]) == []
        assert exemplars(prometheus, began) > 0
        every_family_is_on_the_page(server)


def broken_rules(groups: list[dict]) -> list[str]:
    return [
        f"{rule['name']}: {rule['lastError']}" for group in groups for rule in group["rules"] if rule["health"] == "err"
    ]


def exemplars(prometheus, since: float) -> int:
    name = "gen_ai_server_time_to_first_token_seconds_bucket"
    found = prometheus.get("query_exemplars", query=name, start=since, end=time.time())
    traces = [exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]]
    assert all(re.fullmatch("[0-9a-f]{32}", trace) for trace in traces)
    return len(traces)


def every_family_is_on_the_page(server: Server) -> None:
    """docs/observability.md lists the families that exist, and no other ones."""
    page = Path(ROOT / "docs" / "observability.md").read_text()
    text = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([a-z0-9_:]+)` \|", text, re.MULTILINE))
    live = set()
    for urls in server.ready["metrics"].values():
        for url in urls:
            page = httpx.get(url, headers={"accept": ACCEPT}, timeout=10).text
            for family in text_string_to_metric_families(page):
                live.add(family.name)
    assert live - listed == set(), "not on the page"
    assert listed - live - sometimes(text) == set(), "on the page, and not there"


def sometimes(text: str) -> set[str]:
    """Families that a configuration must switch on, or that appear with an event. The page says so of each."""
    return set(re.findall(r"^\| `([a-z0-9_:]+)[^|]*\|[^|]*\|[^|\n]*(?:only )", text, re.MULTILINE))
