"""B1 through a real server at its default settings: one load tool, one key, 200 requests at once, all of them served."""

from __future__ import annotations

import asyncio
from collections import Counter

import openai
import pytest
from running import Server

NUM_REQUESTS = 200


async def chat(client: openai.AsyncOpenAI, model: str, number: int, *, stream: bool) -> str:
    """Its finish reason, or what it was refused with."""
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": f"What is {number}?"}],
        "max_tokens": 4,
        "extra_body": {"ignore_eos": True},
    }
    try:
        if not stream:
            reply = await client.chat.completions.create(**asked)
            return str(reply.choices[0].finish_reason)
        reasons = [
            chunk.choices[0].finish_reason
            async for chunk in await client.chat.completions.create(**asked, stream=True)
            if chunk.choices
        ]
        return str(reasons[-1])
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.code}"
    except openai.APIConnectionError as error:
        return repr(error.__cause__)


@pytest.mark.parametrize("stream", [False, True])
async def test_b1_two_hundred_requests_at_once_are_all_served(server: Server, stream: bool) -> None:
    """Behind small ones that came one by one, which taught the worker nothing but its fixed costs."""
    url, key = server.ready["base_url"] + "/v1", server.ready["api_key"]
    options = {"max_retries": 0, "timeout": 600}  # to connect too: the client has the same two cores
    async with openai.AsyncOpenAI(base_url=url, api_key=key, **options) as client:
        for number in range(10):
            await chat(client, server.model, -number, stream=stream)
        ended = await asyncio.gather(
            *(chat(client, server.model, number, stream=stream) for number in range(NUM_REQUESTS))
        )
    assert Counter(ended) == {"length": NUM_REQUESTS}
