"""Row P1: `auto` is the checkpoint's dtype, on a CPU too, where that is as fast."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set

import pytest
import torch
from tiny_models import CONFIGS, TinyModel

from kernels.cpu import instructions
from workers.engine.checkpoint import dtypes
from workers.engine.checkpoint.dtypes import ModelDtype
from workers.engine.model import census
from workers.engine.values.errors import ModelError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDE, NARROW, HALF = torch.float32, torch.bfloat16, torch.float16
Choose = Callable[..., ModelDtype]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    def chosen(
        stored: torch.dtype | None,
        has: Set[str],
        widens: bool = True,
        model: str = "llama",
        device: torch.device = CPU,
        rounded: bool = False,
    ) -> ModelDtype:
        monkeypatch.setattr(instructions, "has", lambda name: name in has)
        monkeypatch.setattr(dtypes, "widens", lambda dtype: widens)
        config = CONFIGS[model]()
        config.dtype = stored
        return dtypes.of_model("auto", device, config, rounded)

    return chosen


@pytest.mark.parametrize("has", [{"bf16"}, {"amx"}, {"avx512", "bf16", "amx"}])
@pytest.mark.parametrize("model", ["llama", "gemma2", "mixtral"])
def test_a_cpu_that_computes_in_bfloat16_takes_a_checkpoint_of_it_as_it_is(
    choose: Choose, has: set[str], model: str
) -> None:
    assert choose(NARROW, has, widens=False, model=model).dtype == NARROW


@pytest.mark.parametrize(("model", "dtype"), [("qwen3", NARROW), ("gemma2", WIDE), ("mixtral", WIDE)])
def test_a_cpu_that_widens_takes_it_for_models_with_layers_of_our_own(
    choose: Choose, model: str, dtype: torch.dtype
) -> None:
    assert choose(NARROW, {"avx512"}, model=model).dtype == dtype
    assert choose(NARROW, set(), model=model).dtype == dtype


def test_rounded_weights_are_not_widened_in_registers(choose: Choose) -> None:
    assert choose(NARROW, {"avx512"}, rounded=True).dtype == WIDE
    assert choose(NARROW, {"bf16"}, rounded=True).dtype == NARROW


def test_a_cpu_without_anything_of_16_bits_computes_in_float32_and_says_why(choose: Choose) -> None:
    chosen = choose(NARROW, set(), widens=False)
    assert chosen.dtype == WIDE
    assert chosen.reason == "this CPU does not compute in the checkpoint's bfloat16"


@pytest.mark.parametrize("stored", [WIDE, HALF, None])
def test_other_checkpoints_stay_in_float32_on_every_cpu(choose: Choose, stored: torch.dtype | None) -> None:
    for has in ({"bf16", "amx", "amx_fp16"}, set[str]()):
        assert choose(stored, has).dtype == WIDE


def test_a_gpu_takes_the_checkpoints_dtype(choose: Choose) -> None:
    for stored, dtype in ((HALF, HALF), (WIDE, WIDE), (NARROW, NARROW), (None, NARROW)):
        assert choose(stored, set(), widens=False, device=CUDA).dtype == dtype


def test_what_is_asked_for_wins_and_nonsense_is_named() -> None:
    config = CONFIGS["llama"]()
    assert dtypes.of_model("float16", CPU, config).dtype == HALF
    with pytest.raises(ModelError, match="The dtype int8 is not one of auto, float32"):
        dtypes.of_model("int8", CPU, config)


def test_a_runner_takes_it_and_its_log_says_which_and_why(
    tiny_model: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    model.reference.to(NARROW).save_pretrained(model.directory)
    expected = dtypes.of_model("auto", CPU, census.read_config(str(model.directory)))
    with caplog.at_level(logging.INFO, "workers.engine.device.runner"):
        runner = model.runner()
    assert runner.loaded.model.dtype == runner.store.tensor.dtype == expected.dtype
    assert f"is computed in {expected.name}: {expected.reason}" in caplog.text
    if instructions.has("bf16"):
        assert expected.dtype == NARROW
