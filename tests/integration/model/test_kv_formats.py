"""8-bit KV in the engine: near the unquantized one, smaller, and another KV identity."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
from tiny_models import Driven, TinyModel, drive, place

from workers.engine.device.runner import ModelRunner
from workers.engine.model.packing import pack
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row

TinyModels = Callable[[str], TinyModel]
MODELS = ("llama", "qwen3", "gemma2", "gpt_oss")
"""Hand-written layers, with a norm per head, with window and softcap, with sinks."""
FORMATS = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
LEAST_COSINE = {"int8": 0.998, "fp8": 0.95}
LEAST_AGREEMENT = {"int8": 0.85, "fp8": 0.6}
"""Random weights as wide as these make attention sharp and, in gpt-oss, flip the choice of experts: far worse than a
trained model."""


@torch.inference_mode()
def logits(runner: ModelRunner, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """`[num_tokens, vocab]` of one sequence, read in chunks that end at `cuts`."""
    sequence = Driven(tokens)
    place(runner, [sequence], 0)
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        packed = pack([Row(tokens[start:end], start, sequence.table)], runner.block_size, "cpu", 2)
        runner.loaded.step.context = packed.context
        hidden = runner.loaded.hidden_states(packed.token_ids, packed.positions)
        parts.append(runner.loaded.head(hidden[: end - start]))
    return torch.cat(parts)


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 301), k=length)


CUTS = [20, 47, 48, 49, 50, 51, 52, 53]


@functools.cache
def unquantized(model: TinyModel) -> list[torch.Tensor]:
    """The logits of four texts."""
    runner = model.runner()
    return [logits(runner, text(seed, 60), CUTS) for seed in range(4)]


@FORMATS
@pytest.mark.parametrize("name", MODELS)
def test_logits_point_where_the_unquantized_ones_do(tiny_model: TinyModels, name: str, kv_dtype: str) -> None:
    """Prefill in two chunks, then single tokens. The median: a flipped expert spoils single tokens."""
    eight = tiny_model(name).runner(kv_dtype=kv_dtype)
    cosines, agreements = [], []
    for seed, expected in enumerate(unquantized(tiny_model(name))):
        found = logits(eight, text(seed, 60), CUTS)
        cosines.append(torch.cosine_similarity(found, expected, dim=-1))
        agreements.append((found.argmax(-1) == expected.argmax(-1)).float())
    cosine, agreement = torch.cat(cosines), torch.cat(agreements).mean()
    print(
        f"{name} {kv_dtype}: cosine {cosine.median():.6f}, mean {cosine.mean():.6f}, least {cosine.min():.6f}, ", end=""
    )
    print(f"greedy agreement {agreement:.3f}")
    assert cosine.median() >= LEAST_COSINE[kv_dtype]
    assert agreement >= LEAST_AGREEMENT[kv_dtype]
    assert not torch.equal(found, expected), "nothing was quantized"


@FORMATS
def test_a_stream_does_not_depend_on_its_chunks_or_neighbours(tiny_model: TinyModels, kv_dtype: str) -> None:
    runner = tiny_model("qwen3").runner(kv_dtype=kv_dtype)
    outputs = []
    for chunk, others in ((1 << 30, 0), (5, 2), (1, 0)):
        watched = Driven(text(7, 21))
        neighbours = [Driven(text(9 + i, 6 + i), arrival=i) for i in range(others)]
        drive(runner, [watched, *neighbours], 12, chunk, shuffle_seed=chunk + others)
        outputs.append(watched.output)
    assert outputs[0] == outputs[1] == outputs[2]


@FORMATS
def test_copied_blocks_take_their_scales_along(tiny_model: TinyModels, kv_dtype: str) -> None:
    runner = tiny_model("llama").runner(kv_dtype=kv_dtype)
    tokens = text(3, 13)
    first = logits(runner, tokens, [12])
    table = place_of(runner, tokens)
    free = [block for block in range(1, runner.num_blocks) if block not in table]
    runner.copy_blocks(list(zip(table, free, strict=False)))
    with torch.inference_mode():
        runner.store.scales[:, table] = float("nan")
    again = last_logits(runner, tokens, free[: len(table)])
    torch.testing.assert_close(again, first[-1:], rtol=1e-5, atol=1e-5)


def place_of(runner: ModelRunner, tokens: list[int]) -> list[int]:
    """The blocks that `logits` gave to the sequence: `place` is deterministic."""
    sequence = Driven(tokens)
    free = list(range(1, runner.num_blocks))
    random.Random(0).shuffle(free)
    sequence.table = free[: -(-len(tokens) // runner.block_size)]
    return sequence.table


@torch.inference_mode()
def last_logits(runner: ModelRunner, tokens: list[int], table: list[int]) -> torch.Tensor:
    """Only the last token is computed; all others are read from the blocks."""
    row = Row(tokens[-1:], len(tokens) - 1, table)
    packed = pack([row], runner.block_size, "cpu", 2)
    runner.loaded.step.context = packed.context
    return runner.loaded.head(runner.loaded.hidden_states(packed.token_ids, packed.positions)[:1])


def test_eight_bits_hold_more_tokens_in_the_same_memory(tiny_model: TinyModels) -> None:
    model = tiny_model("llama")  # heads of 64
    exact, eight = (
        model.runner(num_blocks=None, kv_memory=1 << 20, kv_dtype=kv_dtype) for kv_dtype in ("auto", "int8")
    )
    assert exact.store.shape.bytes_per_block == 3 * 2 * 2 * 4 * 64 * 4
    assert eight.store.shape.bytes_per_block == 3 * 2 * 2 * 4 * (64 + 4)
    assert eight.num_blocks == (1 << 20) // eight.store.shape.bytes_per_block
    held = eight.store.tensor.nbytes + eight.store.scales.nbytes
    assert held == eight.num_blocks * eight.store.shape.bytes_per_block


def test_the_format_is_part_of_the_kv_identity(tiny_model: TinyModels) -> None:
    model = tiny_model("llama")
    roots = {
        model.runner(kv_dtype=kv_dtype, dtype=dtype).root
        for kv_dtype in ("auto", "int8", "fp8")
        for dtype in ("float32", "bfloat16")
    }
    assert len(roots) == 6


def test_an_unknown_format_is_refused(tiny_model: TinyModels) -> None:
    with pytest.raises(ModelError, match="int4 is not one of auto, int8, fp8"):
        tiny_model("llama").runner(kv_dtype="int4")
