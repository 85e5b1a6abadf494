"""Copies of whole blocks over all layers: pairs, and packing for offload. Half of the bytes are read, half written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch


def cases(tiny: bool) -> Iterator[Case]:
    # layers, blocks, pairs, KV heads, head size
    sizes = [(2, 9, 3, 2, 32)] if tiny else [(32, 4096, 4, 8, 128), (32, 4096, 1024, 8, 128)]
    for layers, blocks, number, heads, head_dim in sizes:
        size = (layers, blocks, 2, heads, 16, head_dim)
        for kernel in ("block_copy", "gather_blocks", "scatter_blocks"):
            yield Case(
                kernel,
                f"{number} of {blocks} blocks, layers {layers}, heads {heads} x {head_dim}, bf16",
                lambda device, k=kernel, s=size, n=number: _prepare(device, k, s, n),
                bar="6" if number >= 1024 else "",
            )


def _prepare(device: torch.device, kernel: str, size: tuple[int, ...], number: int) -> Prepared:
    """The sources of one call are far apart and pass the cache by themselves where the bar is."""
    ops = dispatch.choose(device)
    kv = torch.randn(size, device=device, dtype=torch.bfloat16)
    staging = torch.randn((number, size[0], *size[2:]), device=device, dtype=torch.bfloat16)
    order = torch.randperm(size[1], device=device)
    source, target = order[:number], order[number : 2 * number]

    def run() -> None:
        if kernel == "block_copy":
            ops.block_copy(kv, source, target)
        elif kernel == "gather_blocks":
            ops.gather_blocks(staging, kv, source)
        else:
            ops.scatter_blocks(kv, staging, target)

    def error() -> float:
        if kernel == "gather_blocks":
            staging.fill_(float("nan"))
        else:
            kv[:, target] = float("nan")
        run()
        packed = {"block_copy": kv[:, source].transpose(0, 1)}.get(kernel, staging)
        found = kv[:, source if kernel == "gather_blocks" else target].transpose(0, 1)
        return 0.0 if torch.equal(found, packed) else float("inf")

    def torch_index() -> None:
        if kernel == "gather_blocks":
            staging.copy_(kv[:, source].transpose(0, 1))
        else:
            kv[:, target] = kv[:, source] if kernel == "block_copy" else staging.transpose(0, 1)

    return Prepared(run, error, 0.0, 2 * staging.numel() * 2, peers={"torch": torch_index})
