"""Smoothing of activations: large channels are divided by a factor, and their weights are multiplied by it, before
rounding.

It knows the layers of the Llama family, and statistics: the largest magnitude of every channel of a norm's output. It
does not know how they were measured (`calibrate`). In exact arithmetic nothing changes (arXiv 2211.10438): a norm's
weight is divided by the factor, and the linear layers after it are multiplied by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from workers.engine.model.llama import Norm, is_of_family
from workers.engine.values.errors import ModelError

_LEAST = 1e-5
"""Smallest magnitude that is used: channels that are always zero are left as they are."""


@dataclass(frozen=True, slots=True)
class Statistics:
    largest: dict[str, torch.Tensor]
    """Largest magnitudes of the channels, by the path of a norm."""
    alpha: float
    """Share of the range that moves from activations into weights: 0 none, 1 all."""
    identity: str


def read(path: Path) -> Statistics:
    """Reads statistics. Raises ModelError with the reason."""
    try:
        with safe_open(path.expanduser(), "pt") as file:
            largest = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            alpha = float((file.metadata() or {})["alpha"])
        digest = hashlib.sha256(path.expanduser().read_bytes()).hexdigest()[:16]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"The statistics {path} cannot be read: {error}.") from error
    return Statistics(largest, alpha, digest)


def sites(model: PreTrainedModel) -> Iterator[tuple[str, Norm, list[nn.Linear]]]:
    """Yields the path of a norm, the norm, and the linear layers that read its output. Yields nothing for other
    families."""
    for path, layer in model.named_modules():
        if not is_of_family(layer):
            continue
        attention, mlp = layer.self_attn, layer.mlp
        readers = [attention.q_proj, attention.k_proj, attention.v_proj]
        yield f"{path}.input_layernorm", layer.input_layernorm, readers
        readers = [mlp.gate_proj, mlp.up_proj]
        yield f"{path}.post_attention_layernorm", layer.post_attention_layernorm, readers


def refuse_beside(rounding: str, num_ranks: int, stored: bool) -> None:
    """Raises ModelError for settings that smoothing cannot be combined with."""
    if stored:
        raise ModelError("The checkpoint is quantized already: smoothing has no place in it.")
    if rounding == "none":
        raise ModelError("HEADGATE_ENGINE_SMOOTHING is for rounded layers: set HEADGATE_ENGINE_QUANT too.")
    if num_ranks > 1:
        raise ModelError("Smoothing cannot be combined with tensor parallelism.")


def fold(model: PreTrainedModel, statistics: Statistics) -> None:
    """Folds the statistics into the model in place. Raises ModelError if they belong to another model."""
    found = list(sites(model))
    if not found or {path for path, *_ in found} != statistics.largest.keys():
        raise ModelError(
            "The statistics are not of this model: smoothing needs those of every norm of a Llama-like one."
        )
    for path, norm, readers in found:
        largest = statistics.largest[path].to(norm.weight.device)
        if largest.shape != norm.weight.shape:
            raise ModelError(f"The statistics of {path} have shape {list(largest.shape)}.")
        factor = _factor(largest, readers, statistics.alpha)
        norm.weight.copy_(norm.weight.double() / factor)
        for reader in readers:
            reader.weight.copy_(reader.weight.double() * factor)


def _factor(largest: torch.Tensor, readers: list[nn.Linear], alpha: float) -> torch.Tensor:
    columns = torch.stack([reader.weight.abs().amax(0) for reader in readers]).amax(0).double()
    largest = largest.double()
    factor = largest.clamp_min(_LEAST) ** alpha / columns.clamp_min(_LEAST) ** (1 - alpha)
    usable = (largest >= _LEAST) & (columns >= _LEAST)
    return torch.where(usable, factor, torch.ones_like(factor))
