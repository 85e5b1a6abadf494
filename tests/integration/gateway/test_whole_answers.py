"""An answer that its client reads in one body comes from the worker in few messages; every other one token by token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from redis_db import emptied

from workers.protocol.messages import GATHERED_TOKENS, Message, StepFrame

NUM_TOKENS = 40
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


pytestmark = pytest.mark.asyncio(loop_scope="module")


class Sizes(list[int]):
    """The numbers of tokens that each delta of a worker had."""

    def __init__(self, worker: ScriptedWorker) -> None:
        super().__init__()
        self._pass_on, worker.sent = worker.sent, self._sent  # type: ignore[method-assign]  # it looks on

    def _sent(self, message: Message) -> Message | None:
        if isinstance(message, StepFrame):
            self.extend(len(delta.tokens) for delta in message.deltas)
        return self._pass_on(message)


Watched = tuple[RunningGateway, Sizes]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def watched(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    directory, redis_url = tmp_path_factory.mktemp("gateway"), emptied(redis_socket, 3)
    async with (
        running_gateway(directory / "home", redis_url) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url) as worker,
    ):
        await gateway.workers(1)
        yield gateway, Sizes(worker)


@pytest.fixture
def gateway(watched: Watched) -> RunningGateway:
    return watched[0]


@pytest.fixture
def sizes(watched: Watched) -> Sizes:
    """Of this test."""
    watched[1].clear()
    return watched[1]


async def ask(gateway: RunningGateway, path: str, **fields: Any) -> bytes:
    prompt: Any = {"prompt": "hello"} if path == "completions" else {"messages": [{"role": "user", "content": "hello"}]}
    body = {"model": MODEL, "max_tokens": NUM_TOKENS, "seed": 3} | prompt | fields
    async with gateway.session() as session, session.post(f"/v1/{path}", json=body) as answer:
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_body_has_the_text_of_the_stream_and_a_tenth_of_its_messages(
    gateway: RunningGateway, sizes: Sizes, path: str
) -> None:
    answer = json.loads(await ask(gateway, path))
    assert list(sizes) == [1, GATHERED_TOKENS, GATHERED_TOKENS, NUM_TOKENS - 1 - 2 * GATHERED_TOKENS]
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    sizes.clear()
    streamed = await ask(gateway, path, stream=True)
    assert list(sizes) == [1] * NUM_TOKENS
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    [whole] = answer["choices"]
    assert text == (whole.get("text") or whole["message"]["content"])


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["never said"]},
        {"logprobs": True},
        {"n": 2},
        {"tools": [NOW], "tool_choice": "auto", "parallel_tool_calls": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_tokens_come_one_by_one_where_one_of_them_may_end_the_answer_or_is_shown(
    gateway: RunningGateway, sizes: Sizes, fields: dict[str, Any]
) -> None:
    await ask(gateway, "chat/completions", **fields)
    assert set(sizes) == {1}
