"""Checkpoints whose linear layers are stored quantized: the formats that are read, and the module that reads each.

It knows settings of quantized checkpoints. Each method has its own module, which knows its tensors. Numbers stay as the
checkpoint has them; nothing is rounded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from transformers import PreTrainedConfig

from workers.engine.checkpoint import stored_compressed, stored_gptq
from workers.engine.checkpoint.checkpoint import Stored
from workers.engine.checkpoint.stored_gptq import Tensors
from workers.engine.layers.quant import Numbers
from workers.engine.sizing.capacity import Format
from workers.engine.values.errors import ModelError


class Scheme(Protocol):
    @property
    def method(self) -> str: ...

    @property
    def counts_as(self) -> Format:
        """The format of about the same size."""

    def takes(self, suffix: str, stored: Stored) -> bool:
        """Returns whether a tensor whose name ends in this suffix belongs to a quantized layer."""

    def numbers(self, tensors: Tensors, in_features: int, out_features: int, path: str) -> Numbers: ...


_METHODS = {"gptq": stored_gptq, "awq": stored_gptq, "compressed-tensors": stored_compressed}


def reasons(config: PreTrainedConfig) -> Iterator[str]:
    """Yields the reasons why the checkpoint's quantized weights cannot be read."""
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
    """Returns how the weights are stored, or None for exact weights. It may be called only for configurations without
    `reasons`."""
    settings = _settings(config)
    if settings is None:
        return None
    scheme: Scheme = _METHODS[settings["quant_method"]].scheme(settings)
    return scheme


def numbers_of(scheme: Scheme, tensors: Tensors, in_features: int, out_features: int, path: str) -> Numbers:
    """Returns the weight of a layer. Raises ModelError if the tensors do not fit a layer of this size."""
    try:
        return scheme.numbers(tensors, in_features, out_features, path)
    except (ValueError, KeyError, ModelError) as error:
        lacking = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"The layer {path} of the checkpoint cannot be read as {scheme.method}: {lacking}.") from error


def refuse_beside(scheme: Scheme | None, rounding: str, num_ranks: int) -> None:
    """Raises ModelError for settings that quantized checkpoints cannot be combined with."""
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
