"""Checkpoints whose linear layers are stored quantized: which of their formats are read, and by what.

Knows settings of quantized checkpoints. The tensors of each method are its own module's. Numbers stay what the checkpoint
says; nothing is rounded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from transformers import PreTrainedConfig

from workers.engine.checkpoint import stored_compressed, stored_gptq
from workers.engine.checkpoint.checkpoint import Stored
from workers.engine.checkpoint.stored_gptq import Tensors
from workers.engine.layers.quant import Numbers
from workers.engine.values.errors import ModelError


class Scheme(Protocol):
    @property
    def method(self) -> str: ...

    def takes(self, suffix: str, stored: Stored) -> bool:
        """Whether a tensor of this name's end belongs to a quantized layer."""

    def numbers(self, tensors: Tensors, in_features: int, out_features: int, path: str) -> Numbers: ...


_METHODS = {"gptq": stored_gptq, "awq": stored_gptq, "compressed-tensors": stored_compressed}


def reasons(config: PreTrainedConfig) -> Iterator[str]:
    """Why the checkpoint's quantized weights cannot be read."""
    settings = _settings(config)
    if settings is None:
        return
    method = settings.get("quant_method") or "unknown"
    if method not in _METHODS:
        yield f"its weights are quantized ({method}), which is not supported"
        return
    for fault in _METHODS[method].faults(settings):
        yield f"its weights are quantized ({method}) {fault}"


def scheme_of(config: PreTrainedConfig) -> Scheme | None:
    """None for exact weights. For configurations without `reasons`."""
    settings = _settings(config)
    if settings is None:
        return None
    scheme: Scheme = _METHODS[settings["quant_method"]].scheme(settings)
    return scheme


def numbers_of(scheme: Scheme, tensors: Tensors, in_features: int, out_features: int, path: str) -> Numbers:
    """Raises ModelError if the tensors are not those of a layer of this size."""
    try:
        return scheme.numbers(tensors, in_features, out_features, path)
    except (ValueError, KeyError, ModelError) as error:
        lacking = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"The layer {path} of the checkpoint cannot be read as {scheme.method}: {lacking}.") from error


def refuse_beside(scheme: Scheme | None, rounding: str, num_ranks: int) -> None:
    """Raises ModelError for what quantized checkpoints do not go together with."""
    if scheme is None:
        return
    if rounding != "none":
        raise ModelError(
            f"The checkpoint is quantized already ({scheme.method}): HEADGATE_ENGINE_QUANT={rounding} cannot be added."
        )
    if num_ranks > 1:
        raise ModelError(f"The checkpoint is quantized ({scheme.method}): it cannot be split over {num_ranks} ranks.")


def _settings(config: PreTrainedConfig) -> dict[str, Any] | None:
    settings = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else settings.to_dict()
