"""Linear layers at decode sizes: int8, int4 and e4m3 weights, of models 1,024, 4,096 and 5,120 wide."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch
from kernels.reference import linear as formats

_DTYPE = torch.bfloat16
_ROTATED_BYTES = 256 << 20
_SHAPES = {
    "0.6B qkv": (4096, 1024),
    "0.6B down": (1024, 3072),
    "8B output": (4096, 4096),
    "8B gate, up": (28672, 4096),
    "8B down": (4096, 14336),
    "14B gate, up": (34816, 5120),
}
_SHARES = {"linear_fp8": 2, "linear_w8": 2, "linear_w4": 4}
"""Weights in the space of a 16-bit one."""


def cases(tiny: bool) -> Iterator[Case]:
    shapes = {"tiny": (48, 256)} if tiny else _SHAPES
    for kernel, (name, (columns, depth)) in itertools.product(_SHARES, shapes.items()):
        for rows in (1, 5) if tiny else (1, 4, 16, 64):
            yield Case(
                kernel,
                f"rows {rows}, {name}: {columns} x {depth}, bf16 in and out",
                lambda device, k=kernel, m=rows, n=columns, d=depth: _prepare(device, k, m, n, d, tiny),
                in_graph=True,
            )


def _prepare(device: torch.device, kernel: str, rows: int, columns: int, depth: int, tiny: bool) -> Prepared:
    weight_bytes = 2 * columns * depth // _SHARES[kernel]
    num_sets = 2 if tiny else max(2, _ROTATED_BYTES // weight_bytes)
    sets = [_Set(device, kernel, rows, columns, depth) for _ in range(num_sets)]
    turn = itertools.cycle(sets)
    peers: dict[str, Callable[[], None]] = {"F.linear, bf16": lambda: next(turn).dense()}
    if kernel == "linear_fp8":
        peers["torch._scaled_mm"] = lambda: next(turn).scaled_mm()
    if kernel == "linear_w4":
        peers["torch._weight_int4pack_mm"] = lambda: _int4pack(sets, next(turn))
    scales = {"linear_w4": 2 * columns * depth // 128}.get(kernel, 4 * columns)
    activations = rows * (depth * (1 if kernel == "linear_fp8" else 2) + 2 * columns)
    return Prepared(
        lambda: next(turn).run(),
        sets[0].error,
        2e-2,
        weight_bytes + scales + activations,
        2 * rows * columns * depth,
        peers,
    )


class _Set:
    """Inputs and weights of one call; the dense weight is that of a peer."""

    def __init__(self, device: torch.device, kernel: str, rows: int, columns: int, depth: int) -> None:
        self._op = getattr(dispatch.choose(device).weights, kernel)
        self._x = torch.randn((rows, depth), device=device, dtype=_DTYPE)
        self._out = torch.empty((rows, columns), device=device, dtype=_DTYPE)
        weight = torch.randn((columns, depth), device=device, dtype=_DTYPE) / depth**0.5
        size = formats.workspace_size(rows, columns, depth)
        self._space = torch.empty(size, device=device)
        self._told: tuple[torch.Tensor | None, ...] = (self._x, weight)
        if kernel == "linear_w8":
            self._told = (self._x, *formats.quantize_int8(weight))
        elif kernel == "linear_w4":
            self._told = (self._x, *formats.quantize_int4(weight))
        elif kernel == "linear_fp8":
            self._told = (*formats.quantize_fp8(self._x), *formats.quantize_fp8(weight))
        self._dense = weight
        self._packed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._expected = self._exact(kernel)

    def run(self) -> None:
        self._op(self._out, *self._told, workspace=self._space)

    def error(self) -> float:
        self._out.fill_(float("nan"))
        self.run()
        sampled = self._out[:: max(1, len(self._out) // 4)]
        difference = (sampled.double() - self._expected).abs().nan_to_num(torch.inf)
        return float(difference.max() / self._expected.abs().max())

    def _exact(self, kernel: str) -> torch.Tensor:
        """float64 on sampled rows, of the weight as it was quantized."""
        x, weight, *rest = self._told
        step = max(1, len(x) // 4)
        if kernel == "linear_w8":
            return x[::step].double() @ weight.double().T * rest[0].double()
        if kernel == "linear_w4":
            return x[::step].double() @ formats.dequantize_int4(weight, *rest, torch.float64)
        x_scale, weight, scale = weight, *rest
        return x[::step].double() @ weight.double().T * x_scale[::step, None] * scale

    def dense(self) -> None:
        F.linear(self._x, self._dense)

    def scaled_mm(self) -> None:
        x, x_scale, weight, scale = self._told
        torch._scaled_mm(x, weight.T, x_scale[:, None], scale[None], out_dtype=_DTYPE)

    def pack(self) -> None:
        """Packs random numbers for torch's own int4 product, whose layout is its own and whose work is the same."""
        if self._packed is None:
            (columns, depth), device = self._dense.shape, self._x.device
            numbers = torch.randint(0, 256, (columns, depth // 2), device=device, dtype=torch.uint8)
            scales = torch.rand((depth // 128, columns, 2), device=device, dtype=_DTYPE)
            self._packed = (torch._convert_weight_to_int4pack(numbers, 8), scales)

    def int4pack(self) -> None:
        torch._weight_int4pack_mm(self._x, self._packed[0], 128, self._packed[1])


def _int4pack(sets: list[_Set], one: _Set) -> None:
    """The first call packs all sets, so that none is packed while calls are timed or captured."""
    for each in sets:
        each.pack()
    one.int4pack()
