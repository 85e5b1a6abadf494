"""Fuses operations inside transformers' own layers, for models without hand-written layers.

It knows modules by their parts, never by a model's class: siblings with the same input, gated products, norms, GPT-2's
transposed weights and its spelling of GELU. Each change is tried in place, during one pass of random tokens in the
dtype that is served: the changed module has to give the output that it gave before, or it stays as it was and the log
says why. It does not know weights' formats: joined layers are built by the maker that builds all linear layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from kernels.dispatch import TWINS, Ops
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.layers import moe
from workers.engine.layers.linear import MakeLinear, PackedLinear, can_pack
from workers.engine.layers.merged_linear import Part, Together, joined
from workers.engine.layers.norm import RmsNorm
from workers.engine.layers.quant import QuantLinear
from workers.engine.model import hf
from workers.engine.model.hf import AttentionSite, StepSlot
from workers.engine.model.packing import pack
from workers.engine.values.plan import Row

log = logging.getLogger(__name__)

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GATED_OPS = {SiLUActivation: "silu_mul", nn.SiLU: "silu_mul", GELUTanh: "gelu_mul", NewGELUActivation: "gelu_mul"}

_UNCALLABLE = (TypeError, ValueError, RuntimeError, AttributeError)
"""The errors that a module raises for arguments that it does not take."""

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one module, made in place."""

    forward: Forward | None = None
    children: dict[str, nn.Module | None] = field(default_factory=dict)
    """New children by name; None removes the child of that name."""

    def apply(self, module: nn.Module) -> Callable[[], None]:
        """Makes the change and returns a function that undoes it."""
        children, forward = dict(module._modules), module.__dict__.get("forward")

        def undo() -> None:
            module._modules.clear()
            module._modules.update(children)
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward

        for name, child in self.children.items():
            if child is None:
                del module._modules[name]
            else:
                module._modules[name] = child
        if self.forward is not None:
            module.forward = self.forward
        return undo


@dataclass(frozen=True, slots=True)
class Found:
    """A module that has just run, and its arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    ops: Ops


Fuser = Callable[[Found, MakeLinear], Change | None]
"""A function that finds a change for a module; it returns None if the module is not of its kind."""


def install(model: PreTrainedModel, sites: Sequence[AttentionSite], ops: Ops, make: MakeLinear) -> int:
    """Changes every module that can be changed, and returns their number. Leaves the attention modules attached to a
    store that no longer exists. Every rank of a split model runs the same passes, whatever it finds in its part."""
    number = 0
    handles: dict[str, torch.utils.hooks.RemovableHandle] = {}

    def settle(name: str, module: nn.Module, args: tuple[Any, ...], how: dict[str, Any], out: Any) -> None:
        nonlocal number
        handles[name].remove()
        number += _settled(name, Found(module, args, ops), how, _first(out), make)

    for name, module in model.named_modules():
        handles[name] = module.register_forward_hook(partial(settle, name), with_kwargs=True)
    _run_once(model, sites, ops)
    for handle in handles.values():
        handle.remove()
    return number


def _run_once(model: PreTrainedModel, sites: Sequence[AttentionSite], ops: Ops) -> None:
    """Runs one pass with a chunk and a single token of random ids."""
    weight = hf.embedding_weight(model)
    shape = KVShape(len(sites), sites[0].num_kv_heads, sites[0].head_dim, 4, weight.dtype)
    step, store = StepSlot(), KVStore(shape, 4, weight.device, ops)
    packed = pack([Row([0], 0, [3]), Row([0] * 5, 0, [1, 2])], 4, weight.device)
    step.context = packed.context
    hf.attach(sites, store, ops, step)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(model.config.vocab_size, (6,), generator=generator)
    hf.hidden_states(model, ids.to(weight.device), packed.positions)


def _settled(name: str, found: Found, how: dict[str, Any], expected: Any, make: MakeLinear) -> bool:
    """Returns whether a change was found for the module, gave the right output, and was made."""
    for fuser in _FUSERS:
        change = fuser(found, PackedLinear)
        if change is not None:
            break
    else:
        return False
    undo = change.apply(found.module)
    if fault := _fault(found, how, expected):
        undo()
        log.warning("%s stays unfused: %s", name, fault)
        return False
    if make is not PackedLinear:  # the comparison used the exact weights
        undo()
        rounded = fuser(found, make)
        assert rounded is not None
        rounded.apply(found.module)
    return True


def _fault(found: Found, how: dict[str, Any], expected: torch.Tensor) -> str:
    """Returns why a changed module does not give the output that it gave before; empty if it does."""
    try:
        error = _difference(_first(found.module.forward(*found.args, **how)), expected)
    except _UNCALLABLE as reason:
        return f"it cannot be called so ({reason})"
    return "" if error <= moe.TOLERANCE[expected.dtype] else f"off by {error:.1e}"


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest output."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


# --- the fusers ---


def _gated(found: Found, make: MakeLinear) -> Change | None:
    """Fuses down(activation(gate) * up) if the device has a kernel for the product."""
    module, ops = found.module, found.ops
    children = dict(module.named_children())
    act = children.get("act_fn", children.get("activation_fn"))
    op = _GATED_OPS.get(type(act))
    if op is None or "down_proj" not in children or ops.chosen[op] is TWINS[op]:
        return None
    forward = GatedProduct(module, getattr(ops, op))
    if "gate_up_proj" in children:
        return Change(forward)
    linears = _same_input(module, ("gate_proj", "up_proj"))
    if not linears:
        return None
    both = joined(make, *linears)
    return Change(forward, {"gate_proj": None, "up_proj": None, "gate_up_proj": both})


class _Gated(Protocol):
    """A module with the two products that `GatedProduct` calls."""

    @property
    def gate_up_proj(self) -> Forward: ...
    @property
    def down_proj(self) -> Forward: ...


class GatedProduct:
    """A gated product. It looks its module's layers up at each call, because they may be replaced until then."""

    def __init__(self, module: nn.Module, op: Callable[..., None]) -> None:
        self._module = cast("_Gated", module)  # `_gated` looked for the one and makes the other
        self._op = op

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self._module.gate_up_proj(x)
        rows = both.reshape(-1, both.shape[-1]).contiguous()
        product = rows.new_empty((len(rows), rows.shape[1] // 2))
        self._op(product, rows)
        return self._module.down_proj(product.view(*both.shape[:-1], -1))


def _siblings(found: Found, make: MakeLinear) -> Change | None:
    for names in _SIBLINGS:
        if linears := _same_input(found.module, names):
            sizes = tuple(linear.out_features for linear in linears)
            together = Together(joined(make, *linears), sizes)
            return Change(children={name: Part(together, i) for i, name in enumerate(names)})
    return None


def _same_input(module: nn.Module, names: Sequence[str]) -> list[Any]:
    """Returns the children of these names if they can be one layer, else an empty list. A layer whose output only
    exists after a collective of the ranks cannot be joined; nor can layers that a checkpoint stores in formats that
    differ."""
    linears: list[Any] = [getattr(module, name, None) for name in names]
    kinds = {type(linear) for linear in linears}
    if kinds != {nn.Linear} and kinds != {QuantLinear}:
        return []
    if len({linear.in_features for linear in linears}) > 1:
        return []
    if len({linear.bias is None for linear in linears}) > 1:
        return []
    if kinds == {QuantLinear}:
        alone = all(linear.split is None for linear in linears)
        return linears if alone and isinstance(joined(PackedLinear, *linears), QuantLinear) else []
    return linears


def _transposed(found: Found, make: MakeLinear) -> Change | None:
    """Replaces GPT-2's layers `[in_features, out_features]` if another layout is faster. No format rounds them."""
    layers = {name: child for name, child in found.module.named_children() if type(child) is Conv1D}
    if not layers or not all(can_pack(layer.weight) for layer in layers.values()):
        return None
    return Change(children={name: PackedLinear(layer.weight.t(), layer.bias) for name, layer in layers.items()})


def _gelu(found: Found, make: MakeLinear) -> Change | None:
    if type(found.module) is not NewGELUActivation:
        return None
    return Change(partial(F.gelu, approximate="tanh"))


def _norm(found: Found, make: MakeLinear) -> Change | None:
    """Finds norms: one weight, one epsilon, rows in and out. The kind of norm is found by its outputs in float32, in
    which a factor of `weight` cannot be mistaken for one of `1 + weight`."""
    module = found.module
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    own = dict(module.named_parameters(recurse=False))
    if not isinstance(eps, float) or own.keys() != {"weight"} or list(module.children()):
        return None
    weight = own["weight"].detach()
    if type(module) in (nn.LayerNorm, nn.RMSNorm) or weight.dim() != 1 or len(found.args) != 1:
        return None
    x = found.args[0].float()
    rows = torch.cat((x, x * 1e-3))  # in the second half the epsilon has an effect
    try:
        expected = module.forward(rows)
    except _UNCALLABLE:
        return None
    for kind in _norms(weight, eps, found.ops):
        if _difference(kind.exact(rows), expected) <= moe.TOLERANCE[torch.float32]:
            return Change(kind)
    return None


class Norm:
    """A norm, computed by a float32 function of rows or by the kernel for it."""

    def __init__(self, exact: Forward, kernel: Callable[..., None] | None = None) -> None:
        self.exact = exact
        self._kernel = kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is None:
            return self.exact(x.float()).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        self._kernel(out, rows)
        return out.view(x.shape)


def _norms(weight: torch.Tensor, eps: float, ops: Ops) -> Iterator[Norm]:
    wide = weight.float()
    has_kernel = ops.chosen["rms_norm"] is not TWINS["rms_norm"]
    for plus_one in (False, True):
        kernel = partial(_rms_kernel, ops, weight, eps, plus_one) if has_kernel else None
        yield Norm(RmsNorm(wide + 1.0 if plus_one else wide, eps), kernel)
    yield Norm(lambda x: F.layer_norm(x, wide.shape, wide, None, eps))


def _rms_kernel(
    ops: Ops, weight: torch.Tensor, eps: float, plus_one: bool, out: torch.Tensor, rows: torch.Tensor
) -> None:
    ops.rms_norm(out, rows, weight, eps, plus_one=plus_one, cast_first=False)


_FUSERS: tuple[Fuser, ...] = (_gated, _siblings, _transposed, _gelu, _norm)
