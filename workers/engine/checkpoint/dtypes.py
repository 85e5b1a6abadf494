"""Chooses the dtype of a model's computation and of its KV, from settings, checkpoint and device.

It knows what a device computes fast. It does not know layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from kernels.cpu import instructions
from workers.engine.layers.linear import widens
from workers.engine.values.errors import ModelError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FP8_CAPABILITY = (8, 9)
_WIDENED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Models whose layers on a CPU take weights of bfloat16 and compute in float32 between them. Other models round to
bfloat16 at each operation; on a CPU without instructions for it, a prompt then takes up to three times as long."""


@dataclass(frozen=True, slots=True)
class ModelDtype:
    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return _name(self.dtype)


def of_model(asked: str, device: torch.device, config: PreTrainedConfig, rounded: bool = False) -> ModelDtype:
    """Chooses the dtype of computation. `asked` is a dtype's name, or auto. `rounded` says that weights are rounded, at
    load or in the checkpoint. The choice depends on what a device has, never on a timing, so that a restart chooses the
    same. Raises ModelError for an unknown name."""
    if asked in _DTYPES:
        return ModelDtype(_DTYPES[asked], "asked for")
    if asked != "auto":
        raise ModelError(f"The dtype {asked} is not one of auto, {', '.join(_DTYPES)}.")
    stored = config.dtype
    assert not isinstance(stored, str), "transformers turns a name into the dtype"
    on_cpu = device.type == "cpu"
    if stored is None:
        usual = torch.float32 if on_cpu else torch.bfloat16
        return ModelDtype(usual, "the checkpoint names none")
    if not on_cpu or stored == torch.float32:
        return ModelDtype(stored, "the checkpoint's")
    if stored != torch.bfloat16:
        return ModelDtype(torch.float32, f"no CPU is faster in the checkpoint's {_name(stored)}")
    if instructions.has("bf16") or instructions.has("amx"):
        return ModelDtype(stored, "the checkpoint's, and this CPU computes in it")
    if config.model_type in _WIDENED and widens(stored) and not rounded:
        return ModelDtype(stored, "the checkpoint's, widened in this CPU's registers")
    return ModelDtype(torch.float32, "this CPU does not compute in the checkpoint's bfloat16")


def of_kv(asked: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Chooses the dtype of KV. `dtype` is that of the model. Raises ModelError for an unknown format, or one that this
    device does not support."""
    if asked == "auto":
        return dtype
    if asked not in _KV_DTYPES:
        raise ModelError(f"The KV dtype {asked} is not one of auto, {', '.join(_KV_DTYPES)}.")
    if asked == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            major, minor = capability
            raise ModelError(f"fp8 KV needs a device of capability 8.9; this one has {major}.{minor}.")
    return _KV_DTYPES[asked]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
