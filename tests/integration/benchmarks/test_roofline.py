"""The arithmetic that the figures of a GPU are divided by, against figures worked out by hand."""

from __future__ import annotations

import random

import pytest

from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.roofline import Arithmetic
from benchmarks.gpu.serving import mixed_workload
from benchmarks.gpu.timing import Ceilings

H200 = Ceilings(4.3e12, 790e12)
SHAPE = {shape.name: shape.arithmetic for shape in SHAPES}


@pytest.mark.parametrize(
    ("name", "num_parameters", "kv_bytes", "floor_ms"),
    [
        ("Qwen3-0.6B", 0.596e9, 114_688, 0.277),
        ("Llama-8B", 7.505e9, 131_072, 3.49),
        ("Qwen3-14B", 13.99e9, 163_840, 6.51),
    ],
)
def test_the_shapes_have_the_published_sizes(name, num_parameters, kv_bytes, floor_ms):
    arithmetic = SHAPE[name]
    assert arithmetic.num_parameters == pytest.approx(num_parameters, rel=2e-3)
    assert arithmetic.kv_bytes_per_token == kv_bytes
    assert arithmetic.decode_s([0], H200) * 1000 == pytest.approx(floor_ms, rel=5e-3)


def test_a_step_of_many_short_sequences_is_bound_by_arithmetic():
    arithmetic = Arithmetic(1_000_000, 0, 0)
    few, many = (arithmetic.decode_s([0] * number, H200) for number in (1, 10_000))
    assert few == pytest.approx(2_000_000 / 4.3e12)
    assert many == pytest.approx(2 * 1_000_000 * 10_000 / 790e12)


def test_the_workload_is_that_of_nano_vllm():
    asks = mixed_workload(256, 1024)
    assert sum(len(ask.prompt) for ask in asks) == 142_827
    assert sum(ask.max_tokens for ask in asks) == 133_966


def test_the_bound_of_the_workload_is_near_the_derived_one():
    asks = mixed_workload(256, 1024)
    prompts, outputs = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    for name, tokens_per_s in (("Qwen3-0.6B", 36_600), ("Llama-8B", 13_700)):
        bound = SHAPE[name].workload_s(prompts, outputs, H200)
        assert sum(outputs) / bound == pytest.approx(tokens_per_s, rel=0.1)


def test_no_order_of_requests_changes_the_bound():
    asks = mixed_workload(20, 200)
    random.Random(3).shuffle(asks)
    prompts, outputs = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    arithmetic = SHAPE["Qwen3-0.6B"]
    assert arithmetic.workload_s(prompts, outputs, H200) == pytest.approx(
        arithmetic.workload_s(prompts[::-1], outputs[::-1], H200)
    )
