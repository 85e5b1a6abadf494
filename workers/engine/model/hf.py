"""transformers' models on paged attention: the registered attention function, the object attached to each attention
module, and one packed pass.

It knows modules and packed tensors. It does not know sequences: the step context says which token belongs to which row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.arguments.batch import PagedBatch, Slots
from kernels.arguments.shared import SharedGroups
from kernels.checks import SUPPORTED_HEAD_DIMS
from kernels.dispatch import Ops
from workers.engine.kv.kv_store import KVStore, LayerKV
from workers.engine.model.attention_scores import MassProbe
from workers.engine.values.errors import ModelError

ATTENTION = "headgate_paged"
_LAYER = "headgate_layer"
"""Attribute of an attention module that holds its `PagedLayer`: it is found without a lookup, and never belongs to
another runner."""
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
)
"""Arguments that some models pass to attention functions and that have no effect here."""


@dataclass(frozen=True, slots=True)
class Trees:
    batch: PagedBatch
    views: torch.Tensor
    """`[num_tokens]` int64: bit masks of the tokens of its row that each token sees (token_tree.views)."""


@dataclass(slots=True)
class StepContext:
    """The rows and slots of the running step's tokens. It is owned by one runner, set before each pass, and read by its
    layers."""

    slots: Slots
    """Slots of the tokens that belong to rows, or to padding rows (-1); tokens after those in the pass are padding."""
    decode: PagedBatch | None
    """The rows with one token, packed first."""
    prefill: PagedBatch | None
    trees: Trees | None = None
    """Rows whose proposed tokens form a tree, packed last."""
    shared: SharedGroups | None = None
    """Decode rows whose common prefix is read once for all of them."""
    mass: MassProbe | None = None
    """Measures the attention of every layer, if a row asks for it."""
    adapted: bool = False
    """Adapters are installed next to the products, whether a row uses one or not: the computation of a row must not
    depend on the other rows."""


@dataclass(slots=True)
class StepSlot:
    """Holds the step's context, which a runner sets; its layers hold this object and nothing else of the runner."""

    context: StepContext | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention function; its tensors are `[num_tokens, heads, head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None


How = tuple[float, int, float, torch.Tensor | None, torch.Tensor | None]
"""Scale, window, softcap, sinks, and scales of 8-bit KV."""


class PagedLayer:
    """The KV of one layer, and how its module attends over it."""

    def __init__(self, store: KVStore, index: int, ops: Ops, step: StepSlot) -> None:
        self._store = store
        self._index = index
        self._ops = ops
        self._step = step

    @property
    def kv(self) -> LayerKV:
        return self._store.layer(self._index)

    def attend(self, call: Call) -> torch.Tensor:
        step, (kv, scales) = self._step.context, self.kv
        assert step is not None, "a pass outside a step"
        num_tokens = len(step.slots)
        key, value = call.key[:num_tokens], call.value[:num_tokens]
        self._ops.kv_write(kv, key, value, step.slots, scales)
        return self.attend_written(call, step)

    def attend_written(self, call: Call, step: StepContext) -> torch.Tensor:
        """Attends over KV that holds the keys and values of this pass already."""
        out, (kv, scales) = torch.empty_like(call.query), self.kv
        how = (call.scale, call.window, call.softcap, call.sinks, scales)
        end = 0
        if step.decode is not None:
            end = step.decode.num_rows
            self._decode(out[:end], call, kv, step, how)
        if step.prefill is not None:
            tokens = slice(end, end := end + step.prefill.starts[-1])
            self._ops.attention_prefill(out[tokens], call.query[tokens], kv, step.prefill, *how)
        if step.trees is not None:
            tokens = slice(end, end := len(step.slots))
            trees = step.trees
            self._ops.attention_prefill(out[tokens], call.query[tokens], kv, trees.batch, *how, tree=trees.views)
        out[end:] = 0.0  # padding attends to nothing
        if step.mass is not None:
            step.mass.add(call.query, kv, scales, call.scale, call.softcap)
        return out

    def _decode(self, out: torch.Tensor, call: Call, kv: torch.Tensor, step: StepContext, how: How) -> None:
        assert step.decode is not None
        query, scale, window, softcap, *rest = call.query[: len(out)], *how
        if step.shared is None or window:  # with a window each row sees another end of the prefix
            self._ops.attention_decode(out, query, kv, step.decode, *how)
            return
        self._ops.attention_shared(out, query, kv, step.decode, step.shared, scale, softcap, *rest)


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """A module that calls the attention function, the shape of its KV, and how it attends."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    has_sinks: bool


class Discovery:
    """Replaces the `PagedLayer` of one module during one pass, and records that it was called."""

    def __init__(self, module: nn.Module, sites: list[AttentionSite]) -> None:
        self._module = module
        self._sites = sites

    def attend(self, call: Call) -> torch.Tensor:
        _, num_kv_heads, head_dim = call.key.shape
        if call.value.shape != call.key.shape or call.query.shape[2] != head_dim:
            raise ModelError("Keys, queries and values of the model differ in size, which is not supported.")
        if any(site.module is self._module for site in self._sites):
            raise ModelError("One attention layer of the model runs twice in a pass, which is not supported.")
        how = (call.scale, call.window, call.softcap, call.sinks is not None)
        num_heads = call.query.shape[1]
        self._sites.append(AttentionSite(self._module, num_heads, num_kv_heads, head_dim, *how))
        return torch.zeros_like(call.query)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """This is the registered attention function. Its tensors are `[1, heads, num_tokens, head_dim]`, already
    rotated."""
    unknown = [name for name in others if others[name] is not None and name not in _WITHOUT_EFFECT]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise ModelError(f"The attention of the model needs {', '.join(unknown)}, which is not supported.")
    call = Call(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    out = getattr(module, _LAYER).attend(call)
    return out[None], None


# The registry is transformers' own and keyed by name; the function holds no state.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, paged_attention)


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """Returns `[vocab, hidden]`, in the dtype and on the device of the model."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def discover(model: PreTrainedModel) -> list[AttentionSite]:
    """Runs one token and returns the modules that attend, in the order in which they run."""
    sites: list[AttentionSite] = []
    for module in model.modules():
        setattr(module, _LAYER, Discovery(module, sites))
    first = torch.zeros(1, dtype=torch.int64, device=embedding_weight(model).device)
    hidden_states(model, first, first)
    for module in model.modules():
        delattr(module, _LAYER)
    _refuse_sites(sites, model.config.num_hidden_layers)
    return sites


def _refuse_sites(sites: Sequence[AttentionSite], num_layers: int) -> None:
    if len(sites) != num_layers:
        raise ModelError(
            f"Only {len(sites)} of the model's {num_layers} layers attend through transformers' interface."
        )
    if len({(site.num_kv_heads, site.head_dim) for site in sites}) != 1:
        raise ModelError("The layers of the model differ in the size of their keys, which is not supported.")
    if sites[0].head_dim not in SUPPORTED_HEAD_DIMS:
        allowed = ", ".join(map(str, sorted(SUPPORTED_HEAD_DIMS)))
        raise ModelError(f"The head size {sites[0].head_dim} of the model is not one of {allowed}.")


def attach(sites: Sequence[AttentionSite], store: KVStore, ops: Ops, step: StepSlot) -> None:
    """Gives each attention module its own layer of the store, in the order in which they run."""
    for index, site in enumerate(sites):
        setattr(site.module, _LAYER, PagedLayer(store, index, ops, step))


def hidden_states(model: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Runs one packed pass without the head: `[num_tokens]` ids and absolute positions → `[num_tokens, hidden]`."""
    output = model.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


class Head:
    """Computes logits from hidden states as the model's own class does. `probe` compares the two, so an operation that
    is missing here leads to a refusal and not to a wrong token."""

    def __init__(self, model: PreTrainedModel, min_rows: int = 1) -> None:
        config = model.config
        self._min_rows = min_rows
        self._project = model.get_output_embeddings()
        self._scale = getattr(config, "logit_scale", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0
        self._softcap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `[num_rows, vocab]` in float32; they are written into `out` if that is given."""
        num_rows = len(hidden)
        if num_rows < self._min_rows:
            hidden = torch.cat((hidden, hidden[:1].expand(self._min_rows - num_rows, -1)))
        logits = self._project(hidden)[:num_rows]
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float() if out is None else out.copy_(logits)
