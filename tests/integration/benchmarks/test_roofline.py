"""The arithmetic that the figures of a GPU are divided by, against figures worked out by hand."""

from __future__ import annotations

import random

import pytest

from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.roofline import workload_s
from benchmarks.gpu.serving import mixed_workload
from workers.engine.sizing.capacity import Ceilings

H200 = Ceilings(4.3e12, 790e12)
SHAPE = {shape.name: shape.served for shape in SHAPES}


def test_the_workload_is_that_of_nano_vllm():
    asks = mixed_workload(256, 1024)
    assert sum(len(ask.prompt) for ask in asks) == 142_827
    assert sum(ask.max_tokens for ask in asks) == 133_966


def test_the_bound_of_the_workload_is_near_the_derived_one():
    asks = mixed_workload(256, 1024)
    prompts, outputs = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    for name, tokens_per_s in (("Qwen3-0.6B", 36_600), ("Llama-8B", 13_700)):
        bound = workload_s(SHAPE[name], prompts, outputs, H200)
        assert sum(outputs) / bound == pytest.approx(tokens_per_s, rel=0.1)


def test_no_order_of_requests_changes_the_bound():
    asks = mixed_workload(20, 200)
    random.Random(3).shuffle(asks)
    prompts, outputs = [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks]
    served = SHAPE["Qwen3-0.6B"]
    assert workload_s(served, prompts, outputs, H200) == pytest.approx(
        workload_s(served, prompts[::-1], outputs[::-1], H200)
    )
