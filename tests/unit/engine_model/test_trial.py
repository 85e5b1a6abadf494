"""Row B9: a worker is ready only when its model has run a step as it will be served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import Driven, TinyModel, drive
from torch import nn

from workers.engine.layers import linear
from workers.engine.model import hf
from workers.engine.values.errors import ModelError

TinyModels = Callable[[str], TinyModel]
PROMPT = list(range(20, 45))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_asks_its_layers_for_their_dtype_is_served(tiny_model: TinyModels, dtype: str) -> None:
    """HunYuan's router reads `wg.weight.dtype`, and a packed layer has no weight any more."""
    model = tiny_model("hunyuan_moe")
    runner = model.runner(dtype=dtype)
    sequence = Driven(PROMPT)
    drive(runner, [sequence], 10)
    ids = torch.tensor([PROMPT])
    expected = model.reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, min_new_tokens=10, do_sample=False
    )
    assert len(sequence.output) == 10
    if dtype == "float32":
        assert sequence.output == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("steps", ["plain", "device"])
def test_a_model_whose_first_step_fails_is_refused_in_a_sentence(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    class Unreadable(linear.PackedLinear):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            del self.weight

    model = tiny_model("hunyuan_moe")

    def packed(model: nn.Module, make: object, head: nn.Module | None = None) -> int:
        return linear.pack_linears(model, Unreadable, head)

    monkeypatch.setattr("workers.engine.device.runner.pack_linears", packed)
    with pytest.raises(ModelError) as refused:
        model.runner(steps=steps)
    assert str(refused.value) == (
        "The model type 'hunyuan_v1_moe' cannot be served: its first step fails with AttributeError: "
        "'Unreadable' object has no attribute 'weight'"
    )


def test_both_a_prompt_and_a_token_behind_it_are_tried(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    called = hf.hidden_states
    sizes: list[int] = []

    def failing(model: object, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sizes.append(int(positions[0]))
        if positions[0] > 0 and len(token_ids) <= linear.MIN_ROWS:
            raise IndexError("no second\nstep")
        return called(model, token_ids, positions)

    monkeypatch.setattr(hf, "hidden_states", failing)
    with pytest.raises(ModelError, match=r"fails with IndexError: no second step$"):
        tiny_model("granite").runner()
    assert sizes[-2:] == [0, 4]  # behind those of the probe


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 2), (1, 3), (4, 2), (16, 8)])
def test_the_smallest_stores_have_room_for_it(tiny_model: TinyModels, block_size: int, num_blocks: int) -> None:
    runner = tiny_model("llama").runner(block_size=block_size, num_blocks=num_blocks)
    assert runner.num_blocks == num_blocks
