"""A draft model is loaded where the model has taken its share of the memory, and products are computed in their dtype."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from workers.engine import loading
from workers.engine.device.guarded import device_of
from workers.engine.device.runner import RunnerSettings
from workers.engine.settings import WorkerSettings
from workers.engine.values.errors import DeviceOutOfMemory, ModelError


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DeviceOutOfMemory])
def test_a_draft_may_take_what_the_model_left_and_no_room_is_one_sentence(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunnerSettings] = []

    def full(settings: RunnerSettings) -> None:
        asked.append(settings)
        raise error("CUDA out of memory")

    monkeypatch.setattr(loading, "ModelRunner", full)
    told = WorkerSettings(model="model", engine_speculate="draft", engine_draft_model="draft")
    with pytest.raises(ModelError, match="does not fit beside the model"):
        loading.load_draft(told, SimpleNamespace(block_size=16, num_blocks=8))
    assert [settings.memory_share for settings in asked] == [1.0]


def test_products_in_float32_are_not_rounded_to_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")  # as torch begins where an image of NVIDIA's says so
        device_of("cpu")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
