"""Chat completions through the real client, the real gateway and the real protocol."""

from __future__ import annotations

import json
from typing import Any

from byte_model import chat_text
from fakes import ScriptedWorker, decode, expected_output
from gateways import MODEL, RunningGateway

from workers.protocol.messages import SamplingParams

MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
PROMPT = [
    256,
    *chat_text(MESSAGES).removeprefix("<|bos|>").split("<|eos|>")[0].encode(),
    257,
    *chat_text(MESSAGES).split("<|eos|>")[1].encode(),
]


def greedy(max_tokens: int) -> list[int]:
    return expected_output(PROMPT, SamplingParams(seed=0, temperature=0.0), max_tokens)


async def test_a_body_has_the_text_and_the_usage_of_the_engine(gateway: RunningGateway) -> None:
    async with gateway.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0)
    expected = greedy(20)
    assert answer.choices[0].message.content == decode(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    headgate = answer.model_extra["headgate"]
    assert headgate["charge_micro_units"] > 0
    assert headgate["request_id"].startswith("req_")


async def test_a_stream_tells_the_same_story_in_pieces(gateway: RunningGateway) -> None:
    async with gateway.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == decode(greedy(20))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:] if chunk.choices)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-2].choices[0].finish_reason == "length"
    assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1


async def test_the_ledger_has_what_the_client_was_told(gateway: RunningGateway, worker: ScriptedWorker) -> None:
    async with gateway.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7, temperature=0)
    await gateway.settled()
    rows = await gateway.sql("SELECT request_id, kind FROM ledger_entry")
    assert [row.kind for row in rows] == ["settle"]
    assert rows[0].request_id == answer.model_extra["headgate"]["request_id"]


async def test_raw_stream_ends_with_done_and_carries_the_headgate_object_last(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3, "stream": True}
    async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        raw = (await answer.read()).decode()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-request-id"].startswith("req_")
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["headgate"]["tier"] == "interactive"
    assert "usage" not in last
    assert all("headgate" not in json.loads(event) for event in events[:-2])
