"""Whether the time to the first token tells a tenant what another tenant has in the cache.

    python benchmarks/first_token_probe.py [--rounds 100] [--output FILE]

In each round a tenant sends a new secret of about 1,850 tokens, which leaves its KV in the cache. Then another tenant, who
has guessed the secret, sends it too, and beside it a text that nobody has sent: if its own guess came sooner, it would
know. The positive control does the same with the first tenant, whose own text is in the cache: it must come sooner, or
the measurement could see nothing. The two of a pair are sent in a random order.

The figure is the area under the ROC curve: the share of pairs of times in which the guess comes before the other text.
0.5 tells nothing, 1 tells everything. Its bounds hold 99 of 100 samples drawn again from the rounds (bootstrap). It is
met where the other tenant's bounds hold 0.5 and the control lies above 0.9.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from fairness_http import new_tenant
from memory import cpu_name, serving

UP = (str(Path(sys.executable).parent / "headgate"), "up", "--port", "0")
NUM_WORDS = 450
"""Words of a text; the demo model's tokenizer makes about four tokens of each."""
CONTROL_BAR = 0.9
CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiou"


def text(source: random.Random) -> str:
    """Words that nobody has said before."""
    return " ".join(
        "".join(source.choice(CONSONANTS) + source.choice(VOWELS) for _ in range(3)) for _ in range(NUM_WORDS)
    )


async def first_token_s(session: aiohttp.ClientSession, url: str, prompt: str) -> float:
    """Seconds from the request to its first token."""
    body = {"model": "headgate-demo", "prompt": prompt, "max_tokens": 1, "stream": True, "temperature": 0}
    began = time.perf_counter()
    async with session.post(url.removesuffix("/v1") + "/v1/completions", json=body) as answer:
        await answer.content.readline()
        first = time.perf_counter() - began
        await answer.read()
    return first


async def pair(session: aiohttp.ClientSession, url: str, guess: str, other: str, source: random.Random) -> list[float]:
    """Returns the times of the guess and of the other text, sent in a random order."""
    times = {}
    for name, prompt in source.sample([("guess", guess), ("other", other)], 2):
        times[name] = await first_token_s(session, url, prompt)
    return [times["guess"], times["other"]]


async def measure(ready: dict[str, Any], rounds: int, source: random.Random) -> dict[str, list[list[float]]]:
    """Returns the pairs of times of the other tenant ("stranger") and of the control ("owner")."""
    found: dict[str, list[list[float]]] = {"stranger": [], "owner": []}
    async with contextlib.AsyncExitStack() as stack:
        owner, stranger = [
            await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {await new_tenant(ready, name)}"}, raise_for_status=True
                )
            )
            for name in ("owner", "stranger")
        ]
        for number in range(rounds + 5):
            secret = text(source)
            await first_token_s(owner, ready["base_url"], secret)
            for name, session in source.sample([("stranger", stranger), ("owner", owner)], 2):
                times = await pair(session, ready["base_url"], secret, text(source), source)
                if number >= 5:  # the first ones warm up connections and keys
                    found[name].append(times)
    return found


def area(pairs: Sequence[Sequence[float]]) -> float:
    """Returns the share of all pairs (guess, other) of the sample in which the guess is sooner; equal times count
    half."""
    others = [other for _, other in pairs]
    wins = sum((guess < other) + 0.5 * (guess == other) for guess, _ in pairs for other in others)
    return wins / len(pairs) ** 2


def summary(pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the area under the ROC curve with its bounds, and the medians in milliseconds."""
    source = random.Random(0)
    areas = sorted(area(source.choices(pairs, k=len(pairs))) for _ in range(600))
    return {
        "area": round(area(pairs), 3),
        "bounds": [round(areas[3], 3), round(areas[-4], 3)],
        "median_ms": {
            name: round(statistics.median(times) * 1e3, 2)
            for name, times in zip(("guess", "other"), zip(*pairs, strict=True), strict=True)
        },
    }


def verdict(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    told = {name: summary(pairs) for name, pairs in found.items()}
    low, high = told["stranger"]["bounds"]
    return told | {"is_met": low <= 0.5 <= high and told["owner"]["area"] >= CONTROL_BAR}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output", type=Path, help="JSON")
    told = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="headgate-probe-") as folder,
        serving(Path(folder) / "home", {}, UP) as ready,
    ):
        found = verdict(uvloop.run(measure(ready, told.rounds, random.Random(told.seed))))
    found |= {"rounds": told.rounds, "seed": told.seed}
    print(json.dumps(found, indent=1))
    if told.output is not None:
        machine = {"cores": os.cpu_count(), "cpu": cpu_name(), "python": platform.python_version()}
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        told.output.write_text(json.dumps({"date": date, "machine": machine, **found}, indent=1) + "\n")
    sys.exit(not found["is_met"])


if __name__ == "__main__":
    main()
