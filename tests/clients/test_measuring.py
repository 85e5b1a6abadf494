"""Programs that measure models and servers: what they read of an answer is what Headgate meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import logprob_of

from clients.installed import command, run
from clients.pages import snippets
from clients.script import CITY
from clients.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PAGE = snippets()
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def environment(world: World) -> dict[str, str]:
    return world.env | OFFLINE | {"TOKENIZER": str(world.gateway.settings.home / "model")}


def samples(directory: Path, task: str) -> list[dict[str, Any]]:
    (path,) = directory.glob(f"out/*/samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def loglikelihood(text: str) -> float:
    """Computes the log-likelihood byte by byte, as the scripted model would."""
    return sum(logprob_of(byte, 0).logprob for byte in text.encode())


async def test_lm_eval_has_the_models_own_loglikelihoods(world: World, tmp_path: Path) -> None:
    done = await run(command(PAGE["lm-eval"][0]), environment(world), tmp_path, limit_s=250)
    assert done.code == 0, done
    num_choices = 0
    for sample in samples(tmp_path, "endings"):
        for (given, _), choice in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
            assert float(given) == pytest.approx(loglikelihood(f" {choice}"), abs=1e-3)
            num_choices += 1
    assert num_choices == 6
    ((sample,),) = (samples(tmp_path, "capitals"),)
    assert json.loads(sample["resps"][0][0]) == CITY


async def test_guidellm_counts_the_tokens_of_the_ledger(world: World, tmp_path: Path) -> None:
    done = await run(command(PAGE["guidellm"][0]), environment(world), tmp_path, limit_s=250)
    assert done.code == 0, done
    report = json.loads((tmp_path / "report.json").read_text())
    measured = [
        (request["prompt_tokens"], request["output_tokens"])
        for request in report["benchmarks"][0]["requests"]["successful"]
    ]
    assert len(measured) == 3
    await world.gateway.settled()
    rows = await world.gateway.sql(
        "SELECT cache_read + cache_write + uncached, output FROM ledger_entry WHERE kind = 'settle'"
    )
    assert set(measured) <= {tuple(row) for row in rows}
