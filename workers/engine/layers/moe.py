"""Mixture-of-experts blocks on the kernels' ops: the choice of experts and their products in a few launches.

It knows blocks of transformers by their parts: a router, and experts with stacked weights. It does not know which layer
it is in. A block whose replacement gives other outputs is kept, and the log says why. Experts are rounded if the format
rounds weights alone; routers never are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from kernels.cpu import compiled
from kernels.dispatch import Ops
from kernels.reference.moe import MAX_TOP_K
from workers.engine.layers import linear
from workers.engine.layers.quant import Numbers, rounded
from workers.engine.sizing.capacity import Format

if TYPE_CHECKING:
    from kernels.cpu.panels import Panels

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Tolerances relative to the largest output of a block or a layer: the rounding of one operation more or less."""
_TOKENS = 8
PANEL = 32
"""Outputs of a panel, of which compiled layers have whole ones (`kernels.cpu.product`, which needs numba)."""
_TIE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Distance of two scores, relative to how far a token's scores are spread, that roundings of this dtype may turn round."""
FORMATS = ("int8", "int4")
"""Formats of linear layers that experts are rounded to as well."""


class Router(Protocol):
    """Chooses the experts of each token."""

    @property
    def weight(self) -> torch.Tensor:
        """`[num_experts, hidden]`"""
        ...

    @property
    def top_k(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the logits, and the weights and numbers of the chosen experts."""
        ...


class StackedExperts(Protocol):
    """All experts of a block. `stacks_experts` names the shapes."""

    @property
    def gate_up_proj(self) -> torch.Tensor: ...
    @property
    def down_proj(self) -> torch.Tensor: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class ExpertBlock(Protocol):
    """A block of transformers that may be replaced."""

    @property
    def gate(self) -> Router: ...
    @property
    def experts(self) -> StackedExperts: ...
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class RoundedExperts:
    """Experts whose matrices have each their own scales. They are widened at every call for the op that takes stacks:
    this saves memory, not time."""

    gate_up: list[Numbers]
    down: list[Numbers]
    dtype: torch.dtype

    def stacks(self, experts: torch.Tensor, waits: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns for the chosen `experts` `[num_tokens, top_k]` both stacks, and the choice as indices into them. With
        `waits` the host waits to learn which experts were chosen, and widens no others."""
        ids = list(range(len(self.down)))
        if waits:
            used = experts.unique()
            ids, experts = used.tolist(), torch.searchsorted(used, experts).to(experts.dtype)
        gate_up = torch.stack([self.gate_up[index].wide(self.dtype) for index in ids])
        down = torch.stack([self.down[index].wide(self.dtype) for index in ids])
        return gate_up, down, experts


class PackedExperts:
    """Experts and their router in a CPU's panels (`kernels.cpu.panels`), the experts one behind the other. A token's
    result has the same bits whatever experts other tokens take."""

    def __init__(self, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        from kernels.cpu import panels  # needs numba

        kind = linear.kind_of(down[0])
        self.router, self.gate_up, self.down = (
            panels.pack(weight.reshape(-1, weight.shape[-1]).contiguous(), kind) for weight in (router, gate_up, down)
        )
        self._product, self._number = panels.product, len(router)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the router's scores of all experts, float32."""
        return self._product(x.to(self.router.input_dtype), self.router)

    def run(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Does the same as the op `moe`."""
        products = torch.zeros((*experts.shape, x.shape[1]))
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            gate, up = self._of(self.gate_up, expert, x[token]).chunk(2, dim=-1)
            products[token, choice] = self._of(self.down, expert, F.silu(gate).mul_(up))
        return (products * weights[:, :, None]).sum(1).to(x.dtype)

    def _of(self, weight: Panels, expert: int, rows: torch.Tensor) -> torch.Tensor:
        outputs = weight.out_features // self._number
        first, size = expert * outputs // PANEL, outputs // PANEL
        own = dataclasses.replace(weight, tensor=weight.tensor[first : first + size], out_features=outputs)
        return self._product(rows.to(weight.input_dtype), own)


class MoeBlock(nn.Module):
    """A block that takes the softmax over all experts, chooses the best of them, and sums their outputs. It shares the
    tensors of the block it replaces, until its experts are rounded or packed."""

    def __init__(self, block: ExpertBlock, ops: Ops) -> None:
        super().__init__()
        router, experts = block.gate, block.experts
        self.router = router.weight.detach()
        self._gate_up, self._down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        self.top_k = router.top_k
        # Mixtral's router has no such setting: it always divides by the sum.
        self.renormalises = bool(getattr(router, "norm_topk_prob", True))
        self._ops = ops
        self.rounded: RoundedExperts | None = None
        self.packed: PackedExperts | None = None

    def pack(self) -> None:
        """Brings the weights into a CPU's panels, which `has_panels` allows; they exist once."""
        self.packed = PackedExperts(self.router, self._gate_up, self._down)
        self._gate_up = self._down = self._down.new_empty(0)

    def round(self, kind: Format) -> None:
        """Rounds each expert's matrices to nearest, as linear layers are. Raises ModelError if int4 cannot group
        them."""
        self.rounded = RoundedExperts(
            [rounded(kind, weight) for weight in self._gate_up],
            [rounded(kind, weight) for weight in self._down],
            self._down.dtype,
        )
        self._gate_up = self._down = self._down.new_empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes and returns `[..., hidden]`."""
        x = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        if len(x) == 0:
            return hidden
        return self.run(x, *self.route(x)).view(hidden.shape)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for `[num_tokens, hidden]` the weights and the experts, each `[num_tokens, top_k]`."""
        chosen = (len(x), self.top_k)
        weights = torch.empty(chosen, dtype=torch.float32, device=x.device)
        experts = torch.empty(chosen, dtype=torch.int32, device=x.device)
        self._ops.weights.route_experts(weights, experts, self._scores(x), self.renormalises)
        return weights, experts

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.router) if self.packed is None else self.packed.scores(x)

    def run(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.run(x, weights, experts)
        gate_up, down = self._gate_up, self._down
        if self.rounded is not None:
            gate_up, down, experts = self.rounded.stacks(experts, waits=x.device.type == "cpu")
        out = torch.empty_like(x)
        self._ops.weights.moe(out, x, gate_up, down, weights, experts)
        return out


def install(model: nn.Module, ops: Ops, kind: Format = "none") -> int:
    """Replaces every block that can be replaced, and rounds its experts if the format does; returns their number.
    Others stay as they are, and the log says so."""
    number = 0
    for path, block in list(model.named_modules()):
        in_panels = has_panels(block)
        if not fits(block):
            continue
        mine = MoeBlock(block, ops)
        if fault := _fault(block, mine):
            log.warning("%s stays transformers' own: %s", path, fault)
            continue
        model.set_submodule(path, mine)
        if kind in FORMATS:
            mine.round(kind)
        elif in_panels:
            mine.pack()
        number += 1
    return number


def stacks_experts(module: nn.Module) -> bool:
    """Returns whether the module holds experts in the op's layout: `gate_up_proj` `[num_experts, 2 · inner, hidden]`,
    gate first, and `down_proj` `[num_experts, hidden, inner]`. Attributes of transformers' experts say so."""
    return (
        {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
        and getattr(module, "is_concatenated", False)
        and not getattr(module, "is_transposed", True)
    )


def fits(block: nn.Module) -> TypeGuard[ExpertBlock]:
    """Returns whether the block may be replaced, judged by its parts alone; `_fault` checks what they compute."""
    children = dict(block.named_children())
    if children.keys() != {"gate", "experts"} or dict(block.named_parameters(recurse=False)):
        return False
    router, experts = children["gate"], children["experts"]
    return (
        {name for name, _ in router.named_parameters()} == {"weight"}
        and 0 < getattr(router, "top_k", 0) <= MAX_TOP_K
        and stacks_experts(experts)
    )


def has_panels(block: nn.Module) -> bool:
    """Returns whether this CPU's compiled products take the experts of a block, in whole panels."""
    if not fits(block) or block.gate.weight.device.type != "cpu" or compiled.functions() is None:
        return False
    stacks = (block.experts.gate_up_proj, block.experts.down_proj)
    return all(
        stack.dtype in (torch.float32, torch.bfloat16) and all(size % PANEL == 0 for size in stack.shape[1:])
        for stack in stacks
    )


def called(block: nn.Module | None, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a layer. Returns its output, `[1, num_tokens, hidden]`, and for each token whether the choice of experts in
    its block is clear of a tie. At a tie either choice is right, so such tokens are not compared. Without a block no
    token is at a tie."""
    if block is None:
        found = call()
        return found, torch.ones(found.shape[1], dtype=torch.bool)
    seen: list[torch.Tensor] = []
    hook = block.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    found = call()
    hook.remove()
    router, top_k = (block.router, block.top_k) if isinstance(block, MoeBlock) else _choice_of(block)
    scores = F.linear(seen[0].float(), router.float())
    if top_k == scores.shape[1]:
        return found, torch.ones(len(scores), dtype=torch.bool)
    best = scores.topk(top_k + 1).values
    return found, best[:, -2] - best[:, -1] > _TIE[router.dtype] * scores.std(dim=-1)


def _choice_of(block: nn.Module) -> tuple[torch.Tensor, int]:
    assert fits(block)
    return block.gate.weight, block.gate.top_k


def _fault(block: ExpertBlock, mine: MoeBlock) -> str:
    """Returns why the two blocks differ on random tokens; empty if they do not. If scores are equal either choice is
    right, so outputs are compared for tokens with the same experts, weights for all."""
    weight = block.gate.weight
    x = torch.randn((_TOKENS, weight.shape[1]), generator=torch.Generator().manual_seed(2))
    x = x.to(weight)
    try:
        _, expected_weights, expected_experts = block.gate(x)
        expected = block(x[None])[0]
    except (TypeError, ValueError, RuntimeError) as error:
        return f"it cannot be called by itself ({error})"
    weights, experts = mine.route(x)
    found, limit = mine.run(x, weights, experts), TOLERANCE[weight.dtype]
    off = (_sorted(weights) - _sorted(expected_weights.float())).abs().max().item()
    if not off <= limit:
        return f"weights of experts are off by {off:.1e}"
    same = (_sorted(experts) == _sorted(expected_experts)).all(-1)
    if same.sum() < _TOKENS // 2:
        return "it takes other experts"
    off = ((found - expected)[same].abs().max() / expected.abs().max()).item()
    return "" if off <= limit else f"off by {off:.1e}"


def _sorted(values: torch.Tensor) -> torch.Tensor:
    return values.sort(dim=-1).values
