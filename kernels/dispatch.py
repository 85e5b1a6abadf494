"""The only way to call a kernel: an op checks its arguments and calls the kernel that was chosen for the device.

Kernels are chosen once per device: a GPU gets the Triton kernels, a CPU their plain-torch twins. A Triton module is
imported only when it is chosen, so a CPU worker needs no triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass

import torch

from kernels import checks
from kernels.arguments.batch import DeviceRows, PagedBatch, Slots, StepInputs
from kernels.arguments.draws import DrawTensors, EditTensors, Workspace, geometry
from kernels.arguments.shared import SharedGroups
from kernels.reference import attention, group_rows, kv, linear, logits, lora, moe, norm, pointwise, rows, sample
from kernels.weight_ops import Kernel, WeightOps

TWINS: dict[str, Kernel] = {
    "advance_rows": rows.advance_rows,
    "attention_decode": attention.attention_decode,
    "attention_prefill": attention.attention_prefill,
    "attention_shared": attention.attention_shared,
    "block_copy": kv.block_copy,
    "count_tokens": logits.count_tokens,
    "gather_blocks": kv.gather_blocks,
    "gelu_mul": pointwise.gelu_mul,
    "group_rows": group_rows.group_rows,
    "input_prep": rows.input_prep,
    "kv_write": kv.kv_write,
    "linear_fp8": linear.linear_fp8,
    "linear_w4": linear.linear_w4,
    "linear_w8": linear.linear_w8,
    "linear_w8a8": linear.linear_w8a8,
    "logits": logits.logits,
    "lora": lora.lora,
    "moe": moe.moe,
    "quantize_tokens": linear.quantize_tokens,
    "rms_norm": norm.rms_norm,
    "rope": pointwise.rope,
    "rope_kv_write": kv.rope_kv_write,
    "route_experts": moe.route_experts,
    "sample": sample.sample,
    "scatter_blocks": kv.scatter_blocks,
    "silu_mul": pointwise.silu_mul,
    "verify": sample.verify,
}
COMPILED: dict[str, str] = {
    name: f"kernels.triton.{module}"
    for module, names in {
        "attention.attention_decode": ("attention_decode",),
        "attention.attention_prefill": ("attention_prefill",),
        "attention.attention_shared": ("attention_shared",),
        "block_copy": ("block_copy", "gather_blocks", "scatter_blocks"),
        "kv_write": ("kv_write", "rope_kv_write"),
        "norm": ("rms_norm",),
        "pointwise": ("gelu_mul", "rope", "silu_mul"),
        "products.group_rows": ("group_rows",),
        "products.linear_quant": ("linear_fp8", "linear_w4", "linear_w8", "linear_w8a8", "quantize_tokens"),
        "products.lora": ("lora",),
        "products.moe": ("moe", "route_experts"),
        "rows": ("advance_rows", "input_prep"),
        "sampling.logits": ("count_tokens", "logits"),
        "sampling.sample": ("sample", "verify"),
    }.items()
    for name in names
}
"""Maps an op's name to the Triton module that has a function of the same name and signature."""


@dataclass(frozen=True)
class Ops:
    """The kernels of one device, called after their checks. A wrong argument is our own mistake, so checks assert."""

    device: torch.device
    chosen: dict[str, Kernel]
    """Maps a kernel's name to the chosen function, for the log and the tests."""

    debug: bool = False
    """Checks also read the contents of tensors, for which the host waits for the device."""

    @property
    def weights(self) -> WeightOps:
        return WeightOps(self.chosen)

    def advance_rows(self, rows: DeviceRows, active: torch.Tensor, tokens: torch.Tensor) -> None:
        checks.check_rows(rows)
        assert tokens.shape == active.shape, (tokens.shape, active.shape)
        assert active.dtype == torch.int32, active.dtype
        assert checks.is_index(tokens), tokens.dtype
        self.chosen["advance_rows"](rows, active, tokens)

    def attention_decode(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        assert batch.starts[-1] == batch.num_rows, "a decode row has one query"
        checks.check_attention(out, query, kv, batch, kv_scales)
        checks.check_heads(query, sinks, lse)
        self.chosen["attention_decode"](out, query, kv, batch, scale, window, softcap, sinks, kv_scales, lse)

    def attention_prefill(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
    ) -> None:
        assert scale > 0.0, scale
        checks.check_attention(out, query, kv, batch, kv_scales)
        checks.check_heads(query, sinks, None)
        if tree is not None:
            assert tree.shape == query.shape[:1], (tree.shape, query.shape)
            assert tree.dtype == torch.int64, tree.dtype
            assert window == 0, "nodes of a tree have no place in a window"
            assert max(batch.query_lens, default=0) <= 64, batch.query_lens
        self.chosen["attention_prefill"](out, query, kv, batch, scale, window, softcap, sinks, kv_scales, tree)

    def attention_shared(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        batch: PagedBatch,
        groups: SharedGroups,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        assert batch.starts[-1] == batch.num_rows == len(groups.own_starts), "one query per row"
        checks.check_attention(out, query, kv, batch, kv_scales)
        checks.check_heads(query, sinks, None)
        self.chosen["attention_shared"](out, query, kv, batch, groups, scale, softcap, sinks, kv_scales)

    def block_copy(
        self, kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor, kv_scales: torch.Tensor | None = None
    ) -> None:
        """Copies blocks. The ids may lie on the host; then their contents are checked too."""
        checks.check_layers(kv, kv_scales)
        assert source.shape == target.shape, (source.shape, target.shape)
        if self._looks_into(target):
            checks.check_targets(target)
            assert not bool(torch.isin(target, source).any()), "a source is also a target"
        source, target = source.to(kv.device), target.to(kv.device)
        self.chosen["block_copy"](kv, source, target, kv_scales)

    def count_tokens(self, counts: torch.Tensor, lines: torch.Tensor, tokens: torch.Tensor) -> None:
        assert counts.dim() == 2, counts.shape
        assert counts.is_contiguous(), counts.stride()
        assert counts.dtype == lines.dtype == torch.int32, (counts.dtype, lines.dtype)
        assert lines.shape == tokens.shape, (lines.shape, tokens.shape)
        self.chosen["count_tokens"](counts, lines, tokens)

    def gather_blocks(
        self,
        staging: torch.Tensor,
        kv: torch.Tensor,
        ids: torch.Tensor,
        staging_scales: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        checks.check_staging(staging, kv, ids, staging_scales, kv_scales)
        self.chosen["gather_blocks"](staging, kv, ids.to(kv.device), staging_scales, kv_scales)

    def gelu_mul(self, out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None = None) -> None:
        checks.check_gated(out, x, out_scales)
        self.chosen["gelu_mul"](out, x, out_scales)

    def input_prep(self, inputs: StepInputs, rows: DeviceRows, active: torch.Tensor, block_size: int) -> None:
        checks.check_rows(rows)
        bucket, max_blocks = len(active), rows.block_table.shape[1]
        assert active.dtype == inputs.seq_lens.dtype == torch.int32, active.dtype
        vectors = (inputs.token_ids, inputs.positions, inputs.slots, inputs.seq_lens)
        assert all(len(vector) == bucket and checks.is_index(vector) for vector in vectors), bucket
        assert inputs.block_table.shape == (bucket, max_blocks), inputs.block_table.shape
        assert inputs.block_table.dtype == torch.int32, inputs.block_table.dtype
        assert inputs.block_table.is_contiguous(), inputs.block_table.stride()
        self.chosen["input_prep"](inputs, rows, active, block_size)

    def kv_write(
        self,
        kv: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: Slots,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        checks.check_kv(kv, kv_scales)
        self._check_slots(slots, kv)
        assert key.shape == value.shape == (len(slots), kv.shape[2], kv.shape[4]), key.shape
        assert key.dtype == value.dtype, (key.dtype, value.dtype)
        assert key.dtype == kv.dtype or kv_scales is not None, (key.dtype, kv.dtype)
        assert key.stride(2) == value.stride(2) == 1, (key.stride(), value.stride())
        self.chosen["kv_write"](kv, key, value, slots, kv_scales)

    def logits(
        self,
        out: torch.Tensor,
        raw: torch.Tensor,
        edits: EditTensors,
        temperature: torch.Tensor,
        workspace: Workspace | None = None,
    ) -> None:
        checks.check_logits(out, workspace)
        checks.check_logits(raw, workspace)
        assert out.shape == raw.shape, (out.shape, raw.shape)
        assert out.data_ptr() != raw.data_ptr(), "raw logits are needed for logprobs"
        checks.check_edits(edits, *raw.shape)
        self.chosen["logits"](out, raw, edits, temperature, workspace)

    def rms_norm(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
        plus_one: bool = False,
        cast_first: bool = True,
        out_scales: torch.Tensor | None = None,
    ) -> None:
        assert x.dim() == 2, x.shape
        assert x.is_contiguous(), x.stride()
        assert weight.shape == x.shape[1:], (weight.shape, x.shape)
        assert out.shape == x.shape, (out.shape, x.shape)
        assert residual is None or (residual.shape == x.shape and residual.is_contiguous()), x.shape
        checks.check_out(out, out_scales)
        how = (residual, plus_one, cast_first, out_scales)
        self.chosen["rms_norm"](out, x, weight, eps, *how)

    def rope(self, out: torch.Tensor, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
        assert x.dim() == 3, x.shape
        assert out.shape == x.shape, (out.shape, x.shape)
        assert out.dtype == x.dtype, (out.dtype, x.dtype)
        assert out.stride(2) == x.stride(2) == 1, (out.stride(), x.stride())
        checks.check_table(table, positions, *x.shape[::2])
        self.chosen["rope"](out, x, table, positions)

    def rope_kv_write(
        self,
        kv: torch.Tensor,
        qkv: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        slots: Slots,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 0.0,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        checks.check_kv(kv, kv_scales)
        self._check_slots(slots, kv)
        num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
        assert qkv.dim() == 2, qkv.shape
        assert qkv.stride(1) == 1, qkv.stride()
        assert qkv.shape[1] % head_dim == 0, (qkv.shape, kv.shape)
        assert qkv.shape[1] > 2 * num_kv_heads * head_dim, (qkv.shape, kv.shape)
        assert len(slots) == len(qkv), (len(slots), qkv.shape)
        assert qkv.dtype == kv.dtype or kv_scales is not None, (qkv.dtype, kv.dtype)
        assert norms is None or all(weight.shape == (head_dim,) for weight in norms), head_dim
        checks.check_table(table, positions, len(qkv), head_dim)
        how = (norms, eps, kv_scales)
        self.chosen["rope_kv_write"](kv, qkv, table, positions, slots, *how)

    def sample(
        self,
        logits: torch.Tensor,
        draws: DrawTensors,
        tokens: torch.Tensor | None = None,
        logprobs: torch.Tensor | None = None,
        raw: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        checks.check_logits(logits, workspace)
        rows = len(logits)
        assert len(draws.seeds) == len(draws.temperature) == rows, (draws.seeds.shape, rows)
        assert draws.seeds.is_contiguous(), draws.seeds.stride()
        assert tokens is None or (tokens.shape, tokens.dtype) == ((rows,), torch.int64)
        assert logprobs is None or (logprobs.shape, logprobs.dtype) == ((rows,), torch.float32)
        assert raw is None or raw.shape == logits.shape, (raw.shape, logits.shape)
        drawn: torch.Tensor = self.chosen["sample"](logits, draws, tokens, logprobs, raw, workspace)
        return drawn

    def sample_workspace(self, max_rows: int, vocab: int) -> Workspace:
        """Returns buffers for `logits` and `sample` of up to `max_rows` rows; a step that is captured needs them."""
        return Workspace.create(max_rows, geometry(vocab), self.device)

    def scatter_blocks(
        self,
        kv: torch.Tensor,
        staging: torch.Tensor,
        ids: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
        staging_scales: torch.Tensor | None = None,
    ) -> None:
        checks.check_staging(staging, kv, ids, staging_scales, kv_scales)
        if self._looks_into(ids):
            checks.check_targets(ids)
        self.chosen["scatter_blocks"](kv, staging, ids.to(kv.device), kv_scales, staging_scales)

    def silu_mul(self, out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None = None) -> None:
        checks.check_gated(out, x, out_scales)
        self.chosen["silu_mul"](out, x, out_scales)

    def verify(
        self,
        accepted: torch.Tensor,
        following: torch.Tensor,
        draws: torch.Tensor,
        proposals: torch.Tensor,
        numbers: torch.Tensor,
    ) -> None:
        rows, most = proposals.shape
        assert draws.shape == (rows, most + 1), (draws.shape, proposals.shape)
        assert accepted.shape == following.shape == numbers.shape == (rows,), accepted.shape
        assert draws.dtype == proposals.dtype == following.dtype == torch.int64, draws.dtype
        assert draws.is_contiguous(), draws.stride()
        assert proposals.is_contiguous(), proposals.stride()
        self.chosen["verify"](accepted, following, draws, proposals, numbers)

    def _looks_into(self, tensor: torch.Tensor) -> bool:
        return self.debug or tensor.device.type == "cpu"

    def _check_slots(self, slots: Slots, kv: torch.Tensor) -> None:
        assert slots.block_size == kv.shape[3], (slots.block_size, kv.shape)
        assert not self.debug or slots.distinct, "a slot is written twice"


def has_fp8(device: torch.device) -> bool:
    """Returns whether a GPU multiplies 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def choose(device: torch.device, compiled: Collection[str] | None = None, debug: bool = False) -> Ops:
    """Returns the ops of a device. `compiled` names the ops that use the Triton kernel; None means all on a GPU, none
    on a CPU. Kernels named on a CPU run in Triton's interpreter, which tests use."""
    if compiled is None:
        compiled = (
            [name for name in COMPILED if name != "linear_fp8" or has_fp8(device)] if device.type == "cuda" else ()
        )
    chosen = dict(TWINS)
    for name in compiled:
        chosen[name] = getattr(importlib.import_module(COMPILED[name]), name)
    return Ops(device, chosen, debug)
