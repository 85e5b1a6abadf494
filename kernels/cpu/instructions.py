"""The CPU instructions that are used: those that the CPU has, without those that a setting hides.

`HEADGATE_ENGINE_CPU` names a kind of CPU, and instructions beyond that kind count as missing. It knows names, not what
an instruction is used for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Literal

VARIABLE = "HEADGATE_ENGINE_CPU"

Instruction = Literal["avx512", "bf16", "amx", "amx_fp16"]

_OF_KIND: dict[str, frozenset[Instruction]] = {
    "avx2": frozenset(),
    "avx512": frozenset({"avx512"}),
    "avx512_bf16": frozenset({"avx512", "bf16"}),
    "amx": frozenset({"avx512", "bf16", "amx", "amx_fp16"}),
}
_ASKED: dict[Instruction, str] = {
    "avx512": "_is_avx512_supported",
    "bf16": "_is_avx512_bf16_supported",
    "amx": "_is_amx_tile_supported",
    "amx_fp16": "_is_amx_fp16_supported",
}
"""Functions of `torch.cpu`; older versions of torch lack some."""
_LIBRARIES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
"""Environment variables that set the same limit for torch and oneDNN."""


def limit_libraries() -> None:
    """Sets the limits of libraries. It has to be called before torch computes anything. Variables that are already set
    remain."""
    for name, value in _LIBRARIES.get(kind(), {}).items():
        os.environ.setdefault(name, value)


def kind() -> str:
    """Returns the kind of CPU that is set. Raises ValueError for an unknown name."""
    told = os.environ.get(VARIABLE, "auto")
    if told != "auto" and told not in _OF_KIND:
        raise ValueError(f"{VARIABLE}: {told} is not one of auto, {', '.join(_OF_KIND)}.")
    return told


@cache
def has(instruction: Instruction) -> bool:
    """Returns whether the instruction is used here."""
    told = kind()
    if told != "auto" and instruction not in _OF_KIND[told]:
        return False
    import torch

    if getattr(torch.cpu, _ASKED[instruction], bool)():
        return True
    arms: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return instruction == "bf16" and bool(arms.get("bf16"))
