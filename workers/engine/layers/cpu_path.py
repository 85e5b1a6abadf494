"""The way in which this CPU computes linear layers of a dtype, in words: for the log of a worker and for `headgate plan`.

It knows what is chosen (`linear`), and says why. It chooses nothing.
"""

from __future__ import annotations

import torch

from kernels.cpu import compiled, instructions
from workers.engine.layers import linear

_SIZES = (32, 32)
"""A weight that fits every kind of panel."""


def of_products(dtype: torch.dtype) -> str:
    """Returns the products of linear layers, with the reason for the choice."""
    limit = "" if instructions.kind() == "auto" else f" ({instructions.VARIABLE}={instructions.kind()})"
    return _products(dtype) + limit


def _products(dtype: torch.dtype) -> str:
    reason = compiled.refusal()
    if reason or dtype not in (torch.float32, torch.bfloat16):
        because = reason or "compiled panels take float32 and bfloat16"
        if linear.widens(dtype):
            return f"FBGEMM, 16 bits in memory and float32 in registers: {because}"
        return f"oneDNN: {because}"
    from kernels.cpu import product  # needs numba

    return {
        product.FLOATS: "compiled panels in float32, for steps of every size",
        product.WIDENED: "compiled panels, bfloat16 widened in registers: this CPU has no faster product of it",
        product.PAIRED: "compiled panels of bfloat16 pairs: this CPU multiplies them twice as fast as float32",
        product.TILED: "compiled panels in the matrix unit, for steps of every size: it computes while weights are read",
    }[linear.kind_of(torch.empty(_SIZES, dtype=dtype, device="meta"))]


def of_layers(whole: bool) -> str:
    """Returns what computes between the products. `whole` says that compiled layers run the model's rows."""
    if reason := compiled.refusal():
        return f"torch's operations: {reason}"
    if whole:
        return "all layers in one compiled call"
    return (
        "torch's operations between products: compiled layers are those of Llama, Mixtral, Qwen3-MoE, Phi, Gemma, "
        "GPT-2, GPT-NeoX and StarCoder2 in whole panels"
    )
