"""Compiled KV writes at realistic sizes against their twins, in every format, and replayed from a graph."""

from __future__ import annotations

import pytest
import torch
from captured import captured

from kernels import dispatch
from kernels.arguments.batch import Slots

CUDA = torch.device("cuda")
INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
BLOCK_SIZE, EPS = 16, 1e-6
FORMATS = pytest.mark.parametrize("stored", [BF16, INT8, FP8], ids=str)


def skip_what_the_device_lacks(stored: torch.dtype) -> None:
    if stored is FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no fp8")


class Layer:
    def __init__(self, stored: torch.dtype, kv_heads: int, head_dim: int, num_tokens: int) -> None:
        num_blocks = 2 + 2 * num_tokens // BLOCK_SIZE
        shape = (num_blocks, 2, kv_heads, BLOCK_SIZE, head_dim)
        self.kv = torch.zeros(shape, device=CUDA, dtype=stored)
        self.scales = None
        if stored.itemsize == 1:
            self.scales = torch.full(shape[:-1], float("nan"), device=CUDA)
        generator = torch.Generator(CUDA).manual_seed(num_tokens)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=CUDA, generator=generator)
        self.slots = slots[:num_tokens].int()
        self.slots[::7] = -1

    def values(self) -> torch.Tensor:
        """Float32, NaN where nothing was written to a quantized layer."""
        wide = self.kv.float()
        return wide if self.scales is None else wide * self.scales[..., None]


def both(call, stored, kv_heads, head_dim, num_tokens) -> tuple[Layer, Layer]:
    """The layers after the compiled kernel and after its twin."""
    layers = []
    for ops in (dispatch.choose(CUDA), dispatch.choose(CUDA, ())):
        layer = Layer(stored, kv_heads, head_dim, num_tokens)
        call(ops, layer)
        layers.append(layer)
    return layers[0], layers[1]


@FORMATS
@pytest.mark.parametrize(
    ("num_tokens", "kv_heads", "head_dim"), [(1, 8, 128), (700, 8, 128), (65, 2, 80), (33, 4, 256)]
)
def test_keys_and_values_have_the_bits_of_the_twin(stored, num_tokens, kv_heads, head_dim):
    skip_what_the_device_lacks(stored)
    pair = torch.randn((2, kv_heads, num_tokens, head_dim), device=CUDA, dtype=BF16)
    pair[:, 0, num_tokens // 2] = 0.0
    key, value = pair.transpose(1, 2)

    def write(ops: dispatch.Ops, layer: Layer) -> None:
        ops.kv_write(layer.kv, key, value, Slots(layer.slots, BLOCK_SIZE), layer.scales)

    mine, twin = both(write, stored, kv_heads, head_dim, num_tokens)
    assert torch.equal(mine.kv.view(torch.uint8), twin.kv.view(torch.uint8))
    if mine.scales is not None:
        assert torch.equal(mine.scales.nan_to_num(-1), twin.scales.nan_to_num(-1))


SHAPES = [
    # tokens, heads, kv heads, head size, columns that turn, norm
    (1, 32, 8, 128, 128, False),
    (700, 16, 8, 128, 128, True),
    (64, 14, 2, 64, 64, False),
    (65, 32, 8, 80, 32, False),
    (33, 16, 2, 256, 64, True),
    (128, 32, 32, 96, 96, False),
]


def angles(size: int) -> torch.Tensor:
    position = torch.arange(4096, device=CUDA, dtype=torch.float64)[:, None]
    angle = position * 1e4 ** -(torch.arange(size // 2, device=CUDA, dtype=torch.float64) * 2 / size)
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fused_write_equals_its_twin(stored, shape):
    skip_what_the_device_lacks(stored)
    num_tokens, heads, kv_heads, head_dim, size, normed = shape
    width = (heads + 2 * kv_heads) * head_dim
    given = torch.randn((num_tokens, width), device=CUDA, dtype=BF16)
    positions = torch.randint(0, 4096, (num_tokens,), device=CUDA)
    weights = torch.rand((2, head_dim), device=CUDA).to(BF16) + 0.5
    norms = (weights[0], weights[1]) if normed else None
    turned = []

    def write(ops: dispatch.Ops, layer: Layer) -> None:
        qkv, slots = given.clone(), Slots(layer.slots, BLOCK_SIZE)
        how = (norms, EPS, layer.scales)
        ops.rope_kv_write(layer.kv, qkv, angles(size), positions, slots, *how)
        turned.append(qkv.view(num_tokens, -1, head_dim))

    mine, twin = both(write, stored, kv_heads, head_dim, num_tokens)
    torch.testing.assert_close(turned[0], turned[1], rtol=2**-7, atol=2**-7)
    assert torch.equal(turned[0][:, heads:], given.view_as(turned[0])[:, heads:])
    # one step of the format, where the norm's sum ends in another order
    largest = twin.values().nan_to_num(0).abs().amax(-1, keepdim=True)
    bound = {INT8: largest / 127, FP8: largest / 14, BF16: largest / 128}[stored]
    difference = (mine.values() - twin.values()).nan_to_num(0).abs()
    assert bool((difference <= bound * 1.01).all())
    if mine.scales is not None:
        assert torch.equal(mine.scales.isnan(), twin.scales.isnan())
        torch.testing.assert_close(mine.scales, twin.scales, rtol=1e-5, atol=0, equal_nan=True)


def test_a_replayed_write_reads_new_slots_and_positions():
    ops, twin = dispatch.choose(CUDA), dispatch.choose(CUDA, ())
    num_tokens, heads, kv_heads, head_dim = 8, 16, 8, 128
    layer, expected = (Layer(INT8, kv_heads, head_dim, num_tokens) for _ in range(2))
    qkv = torch.randn((num_tokens, (heads + 2 * kv_heads) * head_dim), device=CUDA, dtype=BF16)
    table, positions = angles(head_dim), torch.zeros(num_tokens, device=CUDA, dtype=torch.int64)
    slots = Slots(layer.slots, BLOCK_SIZE)
    graph = captured(lambda: ops.rope_kv_write(layer.kv, qkv, table, positions, slots, kv_scales=layer.scales))
    for step in range(3):
        fresh = torch.randn_like(qkv)
        qkv.copy_(fresh)
        positions.fill_(step * 7)
        layer.slots.copy_((torch.randperm(16, device=CUDA) + 16)[:num_tokens])
        layer.kv.zero_()
        layer.scales.fill_(float("nan"))
        graph.replay()
        expected.kv.zero_()
        expected.scales.fill_(float("nan"))
        now = Slots(layer.slots.clone(), BLOCK_SIZE)
        twin.rope_kv_write(expected.kv, fresh, table, positions, now, kv_scales=expected.scales)
        torch.testing.assert_close(qkv, fresh, rtol=2**-7, atol=2**-7)
        assert torch.equal(layer.kv, expected.kv)
        assert torch.equal(layer.scales.nan_to_num(-1), expected.scales.nan_to_num(-1))
