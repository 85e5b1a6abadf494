"""The ways of a CPU over a trained model in bfloat16: the same greedy tokens, but where two are nearly equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.cpu import compiled, instructions
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.device.thread_count import ThreadCount
from workers.engine.layers import linear
from workers.engine.values.plan import Row, SampleSpec
from workers.protocol.messages import SamplingParams

DEMO = Path(__file__).resolve().parents[3] / "ops/demo_model/model"
NUM_ROWS, PROMPT, STEPS = 8, 24, 48
BLOCKS = 1 + (PROMPT + STEPS) // 16
NEAR = 0.15
"""Largest distance of two logits that another way may turn round. Logits of this model reach 20, where bfloat16 has steps
of 0.125; they are float32 here, but everything before them was rounded to 8 bits."""
SHARE = 0.02
"""Largest share of steps in which the best token may be another one."""


def test_greedy_tokens_are_equal_between_ways_but_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := compiled.refusal():
        pytest.skip(reason)
    from kernels.cpu import product, tiles  # need numba

    ways: dict[str, Callable[[torch.Tensor], int]] = {"widened": lambda _: product.WIDENED}
    if tiles.are_there():
        ways["tiled"] = lambda _: product.TILED
    exact, tokens = logits("float32", None)
    for name, kind in ways.items():
        monkeypatch.setattr(linear, "kind_of", kind)
        found, _ = logits("bfloat16", tokens)
        other = found.argmax(-1) != exact.argmax(-1)
        best, chosen = (exact.gather(-1, of.argmax(-1, keepdim=True))[..., 0] for of in (exact, found))
        gaps = (best - chosen)[other]
        share = float(other.float().mean())
        print(
            f"{name}: another token in {share:.2%} of {other.numel()} steps, gaps up to {gaps.max() if len(gaps) else 0:.3f}"
        )
        assert share <= SHARE, name
        assert (gaps <= NEAR).all(), name


@pytest.mark.skipif(not instructions.has("avx512"), reason="no compiled ways")
def test_the_log_names_the_way(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ModelRunner(RunnerSettings(str(DEMO), device="cpu", dtype="float32", num_blocks=4))
    (told,) = [record for record in caplog.records if getattr(record, "event", "") == "cpu_path"]
    way = "compiled panels in float32" if compiled.functions() else "oneDNN"
    assert way in told.getMessage()
    assert ("all layers in one compiled call" in told.getMessage()) is (compiled.functions() is not None)


@pytest.mark.skipif(not instructions.has("avx512"), reason="no compiled ways")
def test_draws_and_logprobs_are_equal_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may change at every step (device/thread_count.py), and nobody may see it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        runner = ModelRunner(RunnerSettings(str(DEMO), device="cpu", num_blocks=1 + NUM_ROWS * BLOCKS))
        found = []
        for pattern in ([1], [2], [2, 1, 2]):
            asked = itertools.cycle(pattern)
            monkeypatch.setattr(ThreadCount, "of", lambda *_, asked=asked: next(asked))
            found.append(drawn(runner))
            assert torch.get_num_threads() in pattern
        assert found[0] == found[1] == found[2]
    finally:
        torch.set_num_threads(before)


def drawn(runner: ModelRunner) -> list[list[tuple[object, ...]]]:
    params = SamplingParams(seed=5, top_p=0.95, logprobs=5, presence_penalty=0.5)
    tokens = [[300 + 7 * number + place for place in range(PROMPT)] for number in range(NUM_ROWS)]
    steps, start = [], 0
    for _ in range(7):
        results = runner.execute([row(number, given, start, params) for number, given in enumerate(tokens)])
        steps.append([result.drawn for result in results])
        start += len(tokens[0])
        tokens = [[result.drawn[0].token] for result in results]
    return steps


def logits(dtype: str, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each step and row, with the tokens that were fed: those given, else the best ones."""
    runner = ModelRunner(RunnerSettings(str(DEMO), device="cpu", dtype=dtype, num_blocks=1 + NUM_ROWS * BLOCKS))
    seen: list[torch.Tensor] = []
    sampler = runner.loaded.sampler
    draw = sampler.draw
    sampler.draw = lambda logits, draws: seen.append(logits.clone()) or draw(logits, draws)
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(300, 1000, (NUM_ROWS, PROMPT), generator=generator).tolist()
    runner.execute([row(number, prompt, 0) for number, prompt in enumerate(prompts)])
    fed = []
    for step in range(STEPS):
        best = seen[-1].argmax(-1) if given is None else given[step]
        fed.append(best)
        runner.execute([row(number, [int(token)], PROMPT + step) for number, token in enumerate(best)])
    return torch.stack(seen), torch.stack(fed)


GREEDY = SamplingParams(seed=0, temperature=0.0)


def row(number: int, tokens: list[int], start: int, params: SamplingParams = GREEDY) -> Row:
    table = list(range(1 + number * BLOCKS, 1 + (number + 1) * BLOCKS))
    return Row(tokens, start, table, (SampleSpec(params, number, start + len(tokens), [], []),))
