"""Servers of others that answer for models: chat, completions, embeddings, Responses and Messages over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateways import MODEL, RunningGateway, running_gateway
from provider import KEY, TEXT, Provider, running_provider

from accounting.prices import prices
from accounting.values.types import Rates
from gateway.base.app_keys import DATABASE

PRICE = Rates(100_000, 1_000_000, 1_000_000, 2_000_000)
MESSAGES = [{"role": "user", "content": "Say something."}]
RATES = {"input": 1.0, "cached": 0.1, "output": 2.0}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with running_provider() as found:
        yield found


def declared(provider: Provider, **more: Any) -> dict[str, Any]:
    models = {
        "bought": {"name": "theirs", "max_output_tokens": 1000, **RATES},
        "vectors": {"task": "embed", "vector_size": 3, **RATES},
    }
    return {"url": f"{provider.url}/v1", "key_env": "PROVIDER_KEY", "models": models, **more}


@pytest.fixture
async def bought(
    tmp_path: Path, redis_url: str, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningGateway]:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with running_gateway(tmp_path / "home", redis_url, upstreams={"mock": declared(provider)}) as gateway:
        await price(gateway, "bought", "vectors")
        yield gateway


async def price(gateway: RunningGateway, *models: str) -> None:
    """Prices models as the provider does."""
    async with gateway.app[DATABASE].write() as conn:
        for model in models:
            await prices.bootstrap(conn, model, {"interactive": PRICE, "batch": PRICE}, 1)


async def test_chat_is_answered_by_an_upstream_and_paid_by_its_usage(
    bought: RunningGateway, provider: Provider
) -> None:
    answer = await bought.client().chat.completions.create(model="bought", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert provider.asked[0]["model"] == "theirs"
    assert provider.heads[0]["Authorization"] == f"Bearer {KEY}"
    assert answer.usage.completion_tokens == 12
    await bought.balanced()
    [row] = await bought.sql("SELECT uncached, output, charge FROM ledger_entry WHERE kind = 'settle'")
    assert (row.uncached, row.output) == (answer.usage.prompt_tokens, 12)
    assert row.charge > 0
