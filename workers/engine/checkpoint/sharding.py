"""Splits one model over several ranks: which part of each tensor a rank has, and where the ranks' outputs are joined.

It knows transformers' tensor-parallel plans (names to styles) and what they mean here. It does not read weights. A
model with a missing or unknown plan is refused; `probe` checks that the split model computes what the whole one does.

Two of the plans' styles join and divide inside a layer, because its projections are packed or normed as one (Phi-3,
OLMo 2, GLM-4): "gather the output" and "take a part of the input". They are done as they say. If they are used around
attention, every rank attends with all heads and holds all their KV: such a model saves memory for weights alone.

Megatron's split (arXiv 1909.08053): q, k, v, gate and up are split by their outputs, o and down by their inputs with a
sum after them, so a layer costs two sums. Embedding and head are split by the vocabulary, as in the plans. If they are
tied they remain one tensor; the head's bytes, which every step reads, are divided, and this costs one more sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.engine.checkpoint import loader
from workers.engine.checkpoint.checkpoint import Part
from workers.engine.layers.linear import Split, SplitLinear
from workers.engine.parallel.group import Parallel
from workers.engine.values.errors import ModelError

_COLUMN, _ROW, _EMBEDDING = "colwise", "rowwise", "embedding_rowwise"
_GATHERED, _SLICED = "colwise_gather_output", "rowwise_split_input"
_WHOLE = ("replicated_with_grad_allreduce",)
_JOINED = (_ROW, _GATHERED, _SLICED)
_STYLES = frozenset({_COLUMN, _EMBEDDING, *_JOINED, *_WHOLE, None})
_KEY_VALUE = re.compile(r"\.(k|v)_proj$")


def split(model: PreTrainedModel, parallel: Parallel) -> dict[str, Part]:
    """Turns a whole model on meta into this rank's part of it; returns the part to read of each tensor that is not
    whole. Raises ModelError, with the numbers, if it cannot be split."""
    if parallel.size == 1:
        return {}
    for reason in _reasons(model, parallel.size):
        raise ModelError(
            f"The model type '{model.config.model_type}' cannot be split over {parallel.size} ranks: {reason}."
        )
    parts = _cut_tensors(model, parallel)
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        style = _style(model, path)
        if style == _EMBEDDING:
            module.forward = VocabularyPart(module, parts[f"{path}.weight"], parallel)
        elif style in _JOINED:
            gather = parallel.gather if module is head else parallel.gather_everywhere
            join = partial(gather, whole=module.out_features)
            part = parts[f"{path}.weight"]
            inputs = slice(part.start, part.end) if style == _SLICED else None
            how = Split(join if style == _GATHERED else parallel.sum, inputs)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, SplitLinear(module, how))
        elif style == _COLUMN:
            module.out_features = len(module.weight)
    return parts


class VocabularyPart:
    """The forward of an embedding of which this rank has only some rows: it gives zeros for all others and sums over
    the ranks."""

    def __init__(self, embedding: nn.Embedding, part: Part, parallel: Parallel) -> None:
        embedding.padding_idx = None  # it counts in the whole vocabulary, and has no effect without gradients
        self._lookup = embedding.forward
        self._part = part
        self._parallel = parallel

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps `[...]` ids to `[..., hidden]`."""
        elsewhere = (token_ids < self._part.start) | (token_ids >= self._part.end)
        rows = (token_ids - self._part.start).masked_fill(elsewhere, 0)
        return self._parallel.sum(self._lookup(rows).masked_fill(elsewhere[..., None], 0.0))


def _cut_tensors(model: PreTrainedModel, parallel: Parallel) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    cut: dict[int, Part | None] = {}
    for name, (tensor, homes) in loader.places(model).items():
        part = _part(model, name, tensor, parallel)
        if cut.setdefault(id(tensor), part) != part:
            raise ModelError(f"The tied tensor {name} would be split in two ways.")
        if part is None:
            continue
        parts[name] = part
        if getattr(*homes[0]) is tensor:  # else it was cut under the other name of a tied tensor
            local = torch.empty(part.local(tensor.shape), dtype=tensor.dtype, device=tensor.device)
            parameter = nn.Parameter(local, requires_grad=False)
            for module, attribute in homes:
                setattr(module, attribute, parameter)
    return parts


def _part(model: PreTrainedModel, name: str, tensor: torch.Tensor, parallel: Parallel) -> Part | None:
    path, _, attribute = name.rpartition(".")
    style = _style(model, path)
    if style is None or style in _WHOLE or (style in _JOINED and attribute != "weight"):
        return None
    dim = 1 if style in (_ROW, _SLICED) else 0
    whole = tensor.shape[dim]
    num_heads = _num_kv_heads(model.config)
    if style == _COLUMN and _KEY_VALUE.search(path) and num_heads < parallel.size:
        size = whole // num_heads
        start = parallel.rank * num_heads // parallel.size * size
        return Part(dim, start, start + size, whole)
    return Part(dim, *parallel.spans(whole)[parallel.rank], whole)


def _style(model: PreTrainedModel, path: str) -> str | None:
    return (model.tp_plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def _reasons(model: PreTrainedModel, size: int) -> Iterator[str]:
    styles = {path: _style(model, path) for path, _ in model.named_modules()}
    if not {_ROW, _SLICED} & set(styles.values()):
        yield "transformers has no plan that splits its layers"
    for path, style in styles.items():
        if style not in _STYLES:
            yield f"its plan splits {path} as {style}, which is not supported"
        if style in (_COLUMN, *_JOINED) and type(model.get_submodule(path)) is not nn.Linear:
            yield f"{path} is not a plain linear layer"
    beside = {path.rpartition(".")[0] for path, style in styles.items() if style == _COLUMN}
    for name in loader.places(model):
        path = name.rpartition(".")[0]
        if styles[path] is None and beside & {path, path.rpartition(".")[0]}:
            yield f"its plan does not say how {name} is split"
    num_heads, num_kv_heads = model.config.num_attention_heads, _num_kv_heads(model.config)
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        yield f"{num_heads} attention heads and {num_kv_heads} key-value heads do not divide evenly"


def _num_kv_heads(config: PreTrainedConfig) -> int:
    number: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return number
