"""What is proved at load: the small copy against transformers, each hand-written layer against its original."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from tiny_models import CONFIGS, Driven, TinyModel, drive
from torch import nn

from kernels.cpu import compiled
from kernels.dispatch import TWINS
from workers.engine.model import hf, llama
from workers.engine.values.errors import ModelError

TinyModels = Callable[[str], TinyModel]
FAMILY = ("llama", "llama-tied-biased", "qwen2", "qwen3", "mistral")
WHERE_COMPILED = ("phi3", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi", "starcoder2", "mixtral")
"""The experts of this Qwen3-MoE do not fill whole panels."""


@pytest.mark.parametrize("name", CONFIGS)
def test_some_families_run_on_hand_written_layers_and_the_others_on_their_own(
    tiny_model: TinyModels, name: str
) -> None:
    model = tiny_model(name).runner().loaded.model
    written = [module for module in model.modules() if isinstance(module, llama.LlamaLayer)]
    expected = FAMILY if compiled.functions() is None else FAMILY + WHERE_COMPILED
    assert len(written) == (model.config.num_hidden_layers if name in expected else 0)
    assert not [module for module in model.modules() if type(module) is nn.Linear]


def test_a_hand_written_layer_that_differs_leaves_the_original_in_its_place(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = Driven([5, 6, 7, 8, 9])
    drive(tiny_model("qwen3").runner(), [good], 8)
    monkeypatch.setattr(llama, "_normed", lambda x, norm: 2 * norm(x))
    with caplog.at_level(logging.WARNING):
        runner = tiny_model("qwen3").runner()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"layer {index} stays transformers' own" for index in range(3)
    ]
    same = Driven([5, 6, 7, 8, 9])
    drive(runner, [same], 8)
    assert same.output == good.output


def refused(model: TinyModel) -> None:
    with pytest.raises(ModelError, match="differ from transformers' own"):
        model.runner()


def test_attention_that_is_off_is_refused(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window ends one token early, in decode alone: nothing shorter than the window could show it."""
    true_decode = TWINS["attention_decode"]

    def off(out: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, *rest: object) -> None:
        batch, scale, window, *others = rest
        true_decode(out, query, kv, batch, scale, window - 1 if window else 0, *others)

    monkeypatch.setitem(TWINS, "attention_decode", off)
    refused(tiny_model("mistral"))
    tiny_model("llama").runner()


def test_positions_that_are_not_the_given_ones_are_refused(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_pass = hf.hidden_states

    def numbering_itself(model: object, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return true_pass(model, ids, torch.arange(len(ids)))

    monkeypatch.setattr(hf, "hidden_states", numbering_itself)
    refused(tiny_model("llama"))


def test_a_step_behind_the_head_that_is_not_known_is_refused(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.Head, "__call__", lambda self, hidden: self._project(hidden).float())
    refused(tiny_model("granite"))
    tiny_model("llama").runner()


@pytest.mark.parametrize("argument", [{"position_bias": torch.zeros(1)}, {"is_causal": False}, {"indices": [1]}])
def test_an_argument_of_attention_that_is_not_known_raises(argument: dict[str, object]) -> None:
    x = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ModelError, match="not supported"):
        hf.paged_attention(nn.Module(), x, x, x, None, **argument)
