"""Counts the size of a model on meta: the model is built as a worker builds it, without its weights.

It knows transformers' modules and their tensors. It does not know devices' speeds, nor what fits (`capacity`). What a
worker would refuse is refused here, with the same messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from workers.engine.checkpoint import checkpoint, loader, sharding, support
from workers.engine.layers import moe
from workers.engine.layers.linear import SplitLinear, can_pack
from workers.engine.model import hf
from workers.engine.model.hf import AttentionSite
from workers.engine.parallel.group import Parallel
from workers.engine.pooling import recipe
from workers.engine.sizing.capacity import Format, ModelSize, Served
from workers.engine.values.errors import ModelError

_META = torch.device("meta")
_EXPERTS = "experts"
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")


class ImaginedRank(Parallel):
    """One of `size` ranks without the others: its shapes are right, its values mean nothing."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, whole: int) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], whole))

    gather_everywhere = gather


@dataclass(frozen=True, slots=True)
class Census:
    whole: Served
    rank: Served
    """The largest part that one rank has; with one rank it is the whole."""
    dtype: str
    context_limit: int


def read_config(model: str) -> PreTrainedConfig:
    """Reads the configuration of a directory (config.json is enough) or a hub id. Raises ModelError, also for what is
    not supported."""
    config = loader.read_config(checkpoint.find(model, weights=False))
    support.refuse_unsupported(config)
    return config


def take(
    config: PreTrainedConfig, dtype: torch.dtype, kv_itemsize: int | None, quant: Format, num_ranks: int, on_cpu: bool
) -> Census:
    """Counts the whole model and the largest rank's part. `kv_itemsize` is the size in bytes of an 8-bit format; None
    means that KV is in the dtype. Raises ModelError if a worker would."""

    def served(num_ranks: int) -> Served:
        # The last part is the largest if parts differ.
        size = _size(config, ImaginedRank(num_ranks - 1, num_ranks))
        kv = (dtype.itemsize, False) if kv_itemsize is None else (kv_itemsize, True)
        return Served(size, dtype.itemsize, quant, *kv, on_cpu and _packs(dtype))

    whole = served(1)
    rank = whole if num_ranks == 1 else served(num_ranks)
    name = str(dtype).removeprefix("torch.")
    return Census(whole, rank, name, support.context_limit(config))


def num_encoder_parameters(model: str) -> tuple[int, PreTrainedConfig] | None:
    """Returns the number of parameters of an encoder that gives vectors or scores, with its configuration; None for any
    other model. Raises ModelError."""
    found = checkpoint.find(model, weights=False)
    config = loader.read_config(found)
    if not recipe.read(found.directory, config, "auto").is_encoder:
        return None
    with torch.device("meta"):
        built = AutoModel.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in built.parameters()), config


def weight_bytes(model: PreTrainedModel, quant: Format, device: torch.device) -> int:
    """Returns the bytes that a model, which may be on meta, takes once it is loaded on the device."""
    dtype = hf.embedding_weight(model).dtype
    packs = device.type == "cpu" and _packs(dtype)
    return Served(count(model), dtype.itemsize, quant, head_is_copied=packs).weight_bytes


def count(model: PreTrainedModel, sites: Sequence[AttentionSite] = ()) -> ModelSize:
    """Counts every parameter once. Without `sites` (`hf.discover`) nothing is known of attention."""
    kinds: Counter[str] = Counter()
    linears: Counter[tuple[int, int]] = Counter()
    stacked: Counter[tuple[int, int]] = Counter()
    head = model.get_output_embeddings().weight
    stacks = {id(tensor) for block in model.modules() if moe.fits(block) for tensor in block.experts.parameters()}
    for kind, tensor in _kinds(model, head):
        if kind == "linear":
            linears[tensor.shape[0], tensor.shape[1]] += 1
            continue
        kinds[kind] += tensor.numel()
        if id(tensor) in stacks:
            stacked[tensor.shape[1], tensor.shape[2]] += len(tensor)
    share = _expert_share(model.config) if kinds["experts"] else 0.0
    site = sites[0] if sites else None
    return ModelSize(
        linears=tuple((*shape, number) for shape, number in linears.items()),
        head=kinds["head"],
        embedding=kinds["embedding"],
        matrices=kinds["matrices"],
        vectors=kinds["vectors"],
        experts=kinds["experts"],
        stacked=tuple((*shape, number) for shape, number in stacked.items()),
        expert_share=share,
        vocab=len(head),
        num_heads=site.num_heads if site else 0,
        num_kv_heads=site.num_kv_heads if site else 0,
        head_dim=site.head_dim if site else 0,
        windows=tuple(site.window for site in sites),
        is_tied=hf.embedding_weight(model) is head,
    )


def _size(config: PreTrainedConfig, parallel: Parallel) -> ModelSize:
    with torch.inference_mode():
        # Nothing that is counted depends on the dtype, and grouped products of experts know shapes of bfloat16 alone.
        model = loader.build(config, torch.bfloat16, torch.device("cpu"), hf.ATTENTION)
        sharding.split(model, parallel)
        # Its buffers were computed on the CPU.
        model.to(_META)  # type: ignore[arg-type]  # the decorator of transformers' `to` hides self from mypy
        return count(model, hf.discover(model))


def _kinds(model: PreTrainedModel, head: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield _kind(f"{path}.{name}", module, tensor, head), tensor


def _kind(name: str, module: nn.Module, tensor: torch.Tensor, head: torch.Tensor) -> str:
    if tensor is head:
        return "head"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if _EXPERTS in name.split("."):
        return "experts"
    if tensor.dim() < 2:
        return "vectors"
    return "linear" if type(module) in (nn.Linear, SplitLinear) else "matrices"


def _expert_share(config: PreTrainedConfig) -> float:
    chosen, number = (
        next((value for name in names if (value := getattr(config, name, None))), None)
        for names in (_NUM_CHOSEN, _NUM_EXPERTS)
    )
    if chosen is None or number is None:
        raise ModelError(
            f"The model type '{config.model_type}' does not say how many of its experts a token is sent to."
        )
    return float(chosen / number)


def _packs(dtype: torch.dtype) -> bool:
    """Returns whether the head is copied. A CPU worker's head is a copy in another layout; an embedding that was the
    same tensor stays in memory too."""
    return can_pack(torch.empty((1, 1), dtype=dtype))
