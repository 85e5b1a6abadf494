"""Prefill attention: causal prompts, a chunk behind a long context, verification of proposals.

Peers attend over contiguous K and V (flashinfer over the same blocks); those that need compiling do so at their first
call, which is not timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch
from kernels.arguments.batch import PagedBatch

_ROTATED_BYTES = 256 << 20
_SAMPLED = 8
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class _Size:
    rows: int
    query_len: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    block_size: int = 16
    tree: bool = False
    """Whether a tree's mask is given. It is the mask of a list here, so that what is computed is the same."""

    @property
    def flops(self) -> int:
        """Counts two products over the keys that each token sees."""
        seen = self.query_len * self.context + self.query_len * (self.query_len + 1) // 2
        return 4 * self.rows * self.heads * self.head_dim * seen

    @property
    def kv_bytes(self) -> int:
        keys = self.rows * (self.query_len + self.context)
        return 2 * keys * self.kv_heads * self.head_dim * _DTYPE.itemsize

    @property
    def num_bytes(self) -> int:
        return self.kv_bytes + 2 * self.rows * self.query_len * self.heads * self.head_dim * 2


def cases(tiny: bool) -> Iterator[Case]:
    for size in _TINY if tiny else _SIZES:
        is_short = size.query_len <= 8
        yield Case(
            "attention_prefill",
            f"rows {size.rows} x {size.query_len}, context {size.context}, "
            f"heads {size.heads}/{size.kv_heads} x {size.head_dim}, bf16, blocks {size.block_size}"
            f"{', tree' * size.tree}",
            lambda device, size=size: _prepare(device, size, tiny),
            in_graph=is_short,
            bar="7" if size.query_len >= 8192 else "",
        )


_TINY = (_Size(1, 40, 0, 4, 2, 32), _Size(2, 3, 60, 4, 2, 32), _Size(2, 9, 60, 4, 2, 32, tree=True))
_SIZES = (
    *(_Size(1, n << 10, 0, h, 8) for h in (32, 16) for n in (1, 2, 4, 8, 16)),
    _Size(1, 8192, 0, 32, 8, block_size=64),
    _Size(1, 2048, 8192, 32, 8),
    _Size(1, 2048, 8192, 16, 8),
    _Size(4, 2048, 0, 32, 8),
    _Size(16, 4, 4096, 32, 8),
    _Size(16, 8, 4096, 32, 8),
    _Size(16, 8, 4096, 32, 8, tree=True),
    _Size(16, 64, 4096, 32, 8),
    _Size(16, 64, 4096, 32, 8, tree=True),
    _Size(1, 8, 32_768, 32, 8),
)


class _Inputs:
    """One set: KV in shuffled blocks, and the same KV row by row."""

    def __init__(self, device: torch.device, size: _Size) -> None:
        length = size.query_len + size.context
        per_row = -(-length // size.block_size)
        ids = 1 + torch.randperm(size.rows * per_row, device=device).view(size.rows, per_row)
        shape = (1 + ids.numel(), 2, size.kv_heads, size.block_size, size.head_dim)
        self.kv = torch.randn(shape, device=device, dtype=_DTYPE)
        shape = (size.rows * size.query_len, size.heads, size.head_dim)
        self.query = torch.randn(shape, device=device, dtype=_DTYPE)
        self.out = torch.empty_like(self.query)
        self.batch = PagedBatch([size.query_len] * size.rows, [size.context] * size.rows, list(ids), size.block_size)
        self.ids = ids
        bits = [(2 << place) - 1 for place in range(size.query_len)] if size.tree else []
        signed = [bit - (1 << 64) if bit >> 63 else bit for bit in bits]
        self.tree = torch.tensor(signed * size.rows, device=device) if size.tree else None

    def rows(self, size: _Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the query `[rows, H, tokens, D]`, K and V `[rows, KVH, tokens, D]`, contiguous."""
        query = self.query.view(size.rows, size.query_len, size.heads, size.head_dim)
        gathered = self.kv[self.ids].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        keys, values = gathered[:, :, :, : size.query_len + size.context].contiguous()
        return query.transpose(1, 2).contiguous(), keys, values


def _prepare(device: torch.device, size: _Size, tiny: bool) -> Prepared:
    ops, scale = dispatch.choose(device), size.head_dim**-0.5
    num_sets = 2 if tiny else min(64, max(2, _ROTATED_BYTES // size.num_bytes))
    sets = [_Inputs(device, size) for _ in range(num_sets)]
    turn = itertools.cycle(sets)

    def run() -> None:
        one = next(turn)
        ops.attention_prefill(one.out, one.query, one.kv, one.batch, scale, tree=one.tree)

    def error() -> float:
        one = sets[0]
        one.out.fill_(float("nan"))
        ops.attention_prefill(one.out, one.query, one.kv, one.batch, scale, tree=one.tree)
        if one.out.isnan().any():
            return float("inf")
        return _sampled_error(one, size, scale)

    memory_bound = size.query_len <= 8
    return Prepared(
        run,
        error,
        2e-2,
        size.num_bytes if memory_bound else 0,
        0 if memory_bound else size.flops,
        _peers(sets, size, scale),
    )


def _sampled_error(one: _Inputs, size: _Size, scale: float) -> float:
    """Returns the largest error at some tokens of the last row, the first and the last among them."""
    query, keys, values = (part[-1].double() for part in one.rows(size))
    group, worst, largest = size.heads // size.kv_heads, 0.0, 0.0
    found = one.out.view(size.rows, size.query_len, size.heads, size.head_dim)[-1].double()
    for token in torch.linspace(0, size.query_len - 1, _SAMPLED).long().unique().tolist():
        seen = size.context + token + 1
        packed = query[:, token].view(size.kv_heads, group, size.head_dim)
        weights = (packed @ keys[:, :seen].transpose(1, 2) * scale).softmax(-1)
        expected = (weights @ values[:, :seen]).view(size.heads, size.head_dim)
        worst = max(worst, float((found[token] - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return worst / largest


def _peers(sets: list[_Inputs], size: _Size, scale: float) -> dict[str, Callable[[], None]]:
    """Two sets of contiguous rows: they are large, and a prompt's attention does not wait for memory."""
    rows = itertools.cycle([one.rows(size) for one in sets[:2]])
    peers = {"torch flex_attention": _flex(rows, size, scale), "flashinfer": _flashinfer(sets, size)}
    if size.context == 0:  # their causal mask is aligned at the upper left
        for name, backend in (
            ("torch SDPA FA2", SDPBackend.FLASH_ATTENTION),
            ("torch SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
        ):
            peers[name] = _sdpa(rows, scale, backend, size)
    return peers


def _sdpa(
    rows: Iterator[tuple[torch.Tensor, ...]], scale: float, backend: SDPBackend, size: _Size
) -> Callable[[], None]:
    def call() -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(
                *next(rows), is_causal=True, scale=scale, enable_gqa=size.heads != size.kv_heads
            )

    return call


def _flex(rows: Iterator[tuple[torch.Tensor, ...]], size: _Size, scale: float) -> Callable[[], None]:
    ready: list[Callable[..., torch.Tensor]] = []

    def compiled(device: torch.device) -> Callable[..., torch.Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def causal(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return key <= query + size.context

        length = size.query_len + size.context
        mask = create_block_mask(causal, None, None, size.query_len, length, device=device)
        call = torch.compile(flex_attention, dynamic=False)
        is_grouped = size.heads != size.kv_heads
        return lambda *tensors: call(*tensors, block_mask=mask, scale=scale, enable_gqa=is_grouped)

    def call() -> None:
        tensors = next(rows)
        if not ready:
            ready.append(compiled(tensors[0].device))
        ready[0](*tensors)

    return call


def _flashinfer(sets: list[_Inputs], size: _Size) -> Callable[[], None]:
    """Over the same blocks, planned before: in an engine a plan serves all layers of a step."""
    planned: list[Callable[[], None]] = []

    def plan(one: _Inputs) -> Callable[[], None]:
        import flashinfer

        space = torch.empty(128 << 20, dtype=torch.uint8, device=one.kv.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
        counts = torch.arange(size.rows + 1, dtype=torch.int32, device=one.kv.device)
        length = size.query_len + size.context
        last = (length - 1) % size.block_size + 1
        wrapper.plan(
            counts * size.query_len,
            counts * one.ids.shape[1],
            one.ids.flatten().to(torch.int32),
            torch.full((size.rows,), last, dtype=torch.int32, device=one.kv.device),
            size.heads,
            size.kv_heads,
            size.head_dim,
            size.block_size,
            causal=True,
            q_data_type=_DTYPE,
        )
        return lambda: wrapper.run(one.query, one.kv)

    turn = itertools.cycle(range(min(2, len(sets))))

    def call() -> None:
        if not planned:
            planned.extend(plan(one) for one in sets[:2])
        planned[next(turn)]()

    return call
