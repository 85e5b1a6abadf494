"""Eight attackers at once, in a process of their own, so that what they cost is not the clock of who is measured.

Run as a module: base URL, API key, model, seconds, a seed, `any` or `refused`. Prints how many answers there were of each
status, as JSON. `refused`: bodies of any size that end in a 4xx.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from random import Random

import aiohttp
from hostile import body

NUM_ATTACKERS = 8
SIZES = [100, 1000, 10_000, 100_000, 1_000_000, 4_000_000, 15_000_000]


def refused(rng: Random, model: str) -> tuple[str, bytes, dict[str, str]]:
    path, data, headers = body(rng, model, rng.choice(SIZES))
    return path, data.rstrip(b"}") + rng.choice([b"", b',"temperature":9}', b"]"]), headers


async def attack(session: aiohttp.ClientSession, model: str, rng: Random, until: float, kind: str) -> Counter[str]:
    found: Counter[str] = Counter()
    while time.monotonic() < until:
        if kind == "refused":
            path, data, headers = refused(rng, model)
        else:
            path, data, headers = body(rng, model, rng.choice(SIZES))
        try:
            async with session.post(path, data=data, headers=headers) as reply:
                await reply.read()
                found[str(reply.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            found[type(error).__name__] += 1
    return found


async def main(url: str, key: str, model: str, seconds: str, seed: str, kind: str) -> None:
    until = time.monotonic() + float(seconds)
    async with aiohttp.ClientSession(
        url, headers={"authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        found = await asyncio.gather(
            *(attack(session, model, Random(f"{seed}/{i}"), until, kind) for i in range(NUM_ATTACKERS))
        )
    print(json.dumps(sum(found, Counter())))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
