"""A system prompt that the operator published is computed once for all tenants; without that, once for each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from load import stretched
from tokenizers import Tokenizer

NUM_TENANTS = 50
PREFIX_TOKENS = 1024
BLOCK_SIZE = 16


def headgate(server, *arguments: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).parent / "headgate", *arguments, "--home", server.home],
        capture_output=True,
        text=True,
        timeout=stretched(30),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def long_prompt(server, word: str) -> str:
    tokenizer = Tokenizer.from_file(f"{server.ready['model_path']}/tokenizer.json")
    text = f"You answer questions about {word}. "
    while len(tokenizer.encode(text, add_special_tokens=False).ids) < PREFIX_TOKENS:
        text += f"Rule {len(text)}: name the module, then quote its documentation. "
    return text


def prefilled(server) -> float:
    name = 'headgate_step_tokens_total{phase="prefill",tier="interactive"}'
    return server.engine_counters().get(name, 0.0)  # absent before the first step


def ask_all(server, keys: list[str], system: str) -> tuple[list[int], float]:
    """Cached tokens of each tenant's one question, and the prompt tokens that the engine computed for all."""

    def ask(number: int) -> int:
        reply = server.client(keys[number]).chat.completions.create(
            model=server.model,
            messages=[
                {"role": "system", "content": system},
                {"role": "user", "content": f"{number} times: what is os.path?"},
            ],
            max_tokens=2,
            temperature=0,
        )
        return reply.usage.prompt_tokens_details.cached_tokens

    before = prefilled(server)
    with ThreadPoolExecutor(8) as pool:
        cached = list(pool.map(ask, range(len(keys))))
    return cached, prefilled(server) - before


def test_fifty_tenants_share_one_published_prompt_and_nothing_else(server):
    keys = [server.tenant_key(f"public-{number}")[1] for number in range(NUM_TENANTS)]
    walled, with_walls = ask_all(server, keys, long_prompt(server, "shelves"))
    assert walled == [0] * NUM_TENANTS

    system = long_prompt(server, "modules")
    made = headgate(server, "prefixes", "add", server.model, "--system", system, "--name", "rules")
    deadline = time.monotonic() + stretched(20)
    while (listed := json.loads(headgate(server, "prefixes", "list", "--json")))[0]["state"] != "pinned":
        assert time.monotonic() < deadline, listed
        time.sleep(0.2)
    assert listed[0]["id"] == made

    shared, without_walls = ask_all(server, keys, system)
    whole = listed[0]["num_tokens"] // BLOCK_SIZE * BLOCK_SIZE
    assert shared == [whole] * NUM_TENANTS
    assert without_walls <= with_walls / 10

    again, _ = ask_all(server, keys[:1], system)
    assert again[0] >= whole  # and its own question, if that filled a block
    headgate(server, "prefixes", "remove", made)
    assert json.loads(headgate(server, "prefixes", "list", "--json")) == []
