"""C16: 200 tenants, each with a text of its own in its prompts, while requests are aborted, preempted and repeated: what
the model reads in its KV is never another tenant's text.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import EOS, ScriptedRunner, ScriptedWorker, decode
from gateways import MODEL, RunningGateway, running_gateway

from workers.engine.values.plan import SampleSpec

NUM_TENANTS, NUM_STREAMS, NUM_AT_ONCE = 200, 300, 24
SHARED = "You are a helpful assistant of a large shop. " * 4
"""All tenants have the same system prompt: what is shared of it may not bring what follows it."""
CANARY = re.compile(r"canary-[0-9a-f]{12}")


class Reader(ScriptedRunner):
    """It says the first canary that it finds in the KV of its sequence, twelve times."""

    def _next(self, known: Sequence[int], draw: SampleSpec) -> int:
        found = CANARY.search(decode(known))
        said = (found[0] if found else "nothing").encode() * 12
        return (*said, EOS)[min(len(draw.output), len(said))]


@pytest.mark.rest
async def test_attack_C16_no_stream_ever_says_another_tenants_canary(tmp_path: Path, redis_url: str) -> None:
    rng = random.Random(16)
    runner = Reader(num_blocks=110, block_size=16)
    async with (
        running_gateway(tmp_path / "home", redis_url, limiter_timeout_s=5.0) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0", runner=runner) as worker,
    ):
        await gateway.workers(1)
        keys = [(await gateway.new_tenant(f"tenant {n:03}"))[1] for n in range(NUM_TENANTS)]
        canaries = [f"canary-{rng.randrange(16**12):012x}" for _ in keys]
        room, said = asyncio.Semaphore(NUM_AT_ONCE), []

        async def one(number: int) -> None:
            async with room:
                tenant = rng.randrange(NUM_TENANTS)
                leaves_after = rng.choice([None, None, 1, 20])
                text = None
                while text is None:
                    text = await _stream(gateway, keys[tenant], canaries[tenant], number, leaves_after)
                whole = canaries[tenant] * 12
                assert text == whole if leaves_after is None else whole.startswith(text), (text, whole)
                said.append(text)

        await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))
        preempted = sum(sum(tier.values()) for tier in worker.engine.scheduler.ranks.num_preempted.values())
        await gateway.balanced(60)
    assert sum(text != "" for text in said) > NUM_STREAMS // 2
    assert preempted > 0


async def _stream(gateway: RunningGateway, key: str, canary: str, number: int, leaves_after: int | None) -> str | None:
    """Returns what the stream said until it ended, or until its client left after so many pieces; None if the server was
    too busy, and it has to be sent again.
    """
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": SHARED},
            {"role": "user", "content": f"{canary} {'and so on ' * (number % 40)}"},
        ],
        "max_tokens": 300,
        "stream": True,
    }
    text, num_pieces = "", 0
    async with gateway.session(key) as session, session.post("/v1/chat/completions", json=body) as answer:
        if answer.status == 503:
            return None
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["delta"].get("content") or ""
            num_pieces += 1
            if num_pieces == leaves_after:
                answer.close()
                break
    return text
