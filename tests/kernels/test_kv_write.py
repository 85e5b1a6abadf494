"""Keys and values into blocks: the twin against float64, the Triton kernel in the interpreter against the twin."""

from __future__ import annotations

import random

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import checks, dispatch
from kernels.arguments.batch import Slots
from kernels.reference.quant import LIMITS, quantize, widen
from kernels.triton.kv_write import select, specimens

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"kv_write", "rope_kv_write"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BLOCK_SIZE, NUM_BLOCKS, EPS = 4, 9, 1e-6
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Layer:
    """Poisoned KV of a layer and its scales, and random slots: one of them -1."""

    def __init__(self, num_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        shape = (NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, head_dim)
        # torch fills no fp8; its NaN is the byte 127
        self._kv = Guarded(shape, torch.uint8 if dtype is FP8 else dtype)
        self._scales = Guarded(shape[:-1], torch.float32) if dtype in LIMITS else None
        self.kv = self._kv.tensor.view(dtype)
        self.scales = None if self._scales is None else self._scales.tensor
        self.untouched = self._kv.tensor.clone()
        free = list(range(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))
        random.Random(num_tokens).shuffle(free)
        self.places = free[:num_tokens]
        self.places[num_tokens // 2] = -1
        self.slots = Slots(torch.tensor(self.places, dtype=torch.int32), BLOCK_SIZE)

    def check(self) -> None:
        """Nothing but the slots of the tokens was written."""
        self._kv.check()
        if self._scales is not None:
            self._scales.check()
        written = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        written[[place for place in self.places if place >= 0]] = True
        rest = ~written.view(NUM_BLOCKS, BLOCK_SIZE)
        now, before = (t.permute(0, 3, 1, 2, 4)[rest].view(torch.uint8) for t in (self._kv.tensor, self.untouched))
        assert torch.equal(now, before)
        if self.scales is not None:
            assert bool(self.scales.permute(0, 3, 1, 2)[rest].isnan().all())

    def stored(self, token: int) -> torch.Tensor:
        """`[2, KVH, D]` in float64, dequantized."""
        block, offset = divmod(self.places[token], BLOCK_SIZE)
        found = self.kv[block, :, :, offset].double()
        return found if self.scales is None else found * self.scales[block, :, :, offset, None].double()


def angles(num_positions: int, size: int) -> torch.Tensor:
    position = torch.arange(num_positions, dtype=torch.float64)[:, None]
    angle = position * 100.0 ** -(torch.arange(size // 2, dtype=torch.float64) * 2 / size)
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def turned(head: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """One head, `[D]` in float64, angle by angle."""
    out, half = head.clone(), len(row) // 2
    for index in range(half):
        low, high = index, index + half
        cos, sin = row[index].double(), row[half + index].double()
        out[low] = head[low] * cos - head[high] * sin
        out[high] = head[high] * cos + head[low] * sin
    return out


class Step:
    """A fused projection's output, a table and positions."""

    def __init__(
        self, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, size: int, normed: bool, num_tokens: int = 3
    ) -> None:
        generator = torch.Generator().manual_seed(head_dim + size)
        width = (heads + 2 * kv_heads) * head_dim
        guarded = Guarded((num_tokens, width), dtype)
        self.qkv, self.guard = guarded.tensor, guarded
        self.qkv.copy_(torch.randn((num_tokens, width), generator=generator))
        self.before = self.qkv.clone().view(num_tokens, -1, head_dim)
        self.table = angles(20, size)
        self.positions = torch.randint(0, 20, (num_tokens,), generator=generator)
        weights = (1 + torch.randn((2, head_dim), generator=generator) / 4).to(dtype)
        self.norms = (weights[0], weights[1]) if normed else None
        self.heads, self.kv_heads = heads, kv_heads

    def run(self, ops: dispatch.Ops, layer: Layer) -> None:
        how = (self.norms, EPS, layer.scales)
        ops.rope_kv_write(layer.kv, self.qkv, self.table, self.positions, layer.slots, *how)
        self.guard.check()
        layer.check()

    def expected(self, token: int, head: int) -> torch.Tensor:
        """A head after norm and rotation, in float64."""
        found = self.before[token, head].double()
        if head >= self.heads + self.kv_heads:
            return found
        if self.norms is not None:
            weight = self.norms[0 if head < self.heads else 1].double()
            found = found / (found.square().mean() + EPS).sqrt() * weight
        return turned(found, self.table[self.positions[token]])


def all_expected(step: Step) -> torch.Tensor:
    num_tokens, heads, _ = step.before.shape
    rows = [[step.expected(token, head) for head in range(heads)] for token in range(num_tokens)]
    return torch.stack([torch.stack(row) for row in rows])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 32), (1, 80), (17, 16)])
def test_keys_and_values_are_stored_as_they_are(ops, dtype, kv_heads, head_dim):
    layer = Layer(5, kv_heads, head_dim, dtype)
    # as transformers gives them: head by head, the tokens of each together
    pair = torch.randn(2, kv_heads, 5, head_dim).to(dtype)
    key, value = pair.transpose(1, 2)
    ops.kv_write(layer.kv, key, value, layer.slots)
    layer.check()
    for token, place in enumerate(layer.places):
        if place >= 0:
            assert torch.equal(layer.stored(token), pair[:, :, token].double())


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eight_bits_keep_every_value_within_half_a_step(ops, dtype):
    layer = Layer(6, 2, 32, torch.int8)
    key, value = torch.randn(2, 6, 2, 32).to(dtype)
    key[0, 0] = 0.0
    ops.kv_write(layer.kv, key, value, layer.slots, layer.scales)
    layer.check()
    for token, place in enumerate(layer.places):
        if place >= 0:
            expected = torch.stack((key[token], value[token])).double()
            step = expected.abs().amax(-1, keepdim=True) / 127
            assert bool(((layer.stored(token) - expected).abs() <= step * 0.5001).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernel_quantizes_to_the_same_bits_as_the_twin(dtype):
    """Values of few bits meet many ties."""
    key, value = torch.randn(2, 32, 17, 128).to(dtype)
    if dtype is torch.float32:
        key *= torch.logspace(-6, 6, 32)[:, None, None]
        value[2, 0] = 1e-38
    key[1, 1] = 0.0
    layers = [Layer(32, 17, 128, torch.int8) for _ in range(2)]
    for ops, layer in zip((TWIN, TRITON), layers, strict=True):
        ops.kv_write(layer.kv, key, value, layer.slots, layer.scales)
    assert torch.equal(layers[0].kv, layers[1].kv)
    assert torch.equal(layers[0].scales.nan_to_num(7), layers[1].scales.nan_to_num(7))


def test_rows_of_zeros_have_scale_one():
    for dtype in LIMITS:
        stored, scale = quantize(torch.tensor([[0.0, -0.0], [1e-39, 0.0], [2.0, -1.0]]), dtype)
        assert scale.tolist()[:2] == [1.0, 1.0]
        assert stored.float()[:2].abs().sum() == 0
        assert stored.float()[2, 0] == LIMITS[dtype]


def test_all_numbers_of_fp8_are_widened_exactly():
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128).view(FP8)
    assert torch.equal(widen(numbers).nan_to_num(999), numbers.float().nan_to_num(999))


def test_the_twin_stores_fp8_within_its_own_rounding():
    layer = Layer(6, 2, 32, FP8)
    key, value = torch.randn(2, 6, 2, 32)
    TWIN.kv_write(layer.kv, key, value, layer.slots, layer.scales)
    layer.check()
    expected = torch.stack((key[0], value[0])).double()
    # three bits behind the point, and the smallest steps where numbers are small
    bound = expected.abs() / 16 + expected.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    assert bool(((layer.stored(0) - expected).abs() <= bound * 1.0001).all())


SHAPES = [
    # heads, kv heads, head size, columns that turn, norm
    (2, 1, 32, 32, False),
    (4, 2, 32, 32, True),
    (3, 3, 16, 16, True),
    (14, 2, 32, 32, False),
    (2, 1, 80, 80, True),
    (2, 1, 80, 32, False),
    (2, 1, 96, 48, True),
]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_and_keys_turn_as_in_float64(ops, dtype, shape):
    step, layer = Step(dtype, *shape), Layer(3, shape[1], shape[2], dtype)
    step.run(ops, layer)
    expected, heads = all_expected(step), shape[0]
    found = step.qkv.view_as(step.before)
    assert relative_error(found[:, :heads], expected[:, :heads]) <= DTYPES[dtype]
    assert torch.equal(found[:, heads:], step.before[:, heads:]), "keys and values stay where they were"
    for token, place in enumerate(layer.places):
        if place >= 0:
            stored = layer.stored(token).flatten(0, 1)
            assert relative_error(stored, expected[token, heads:]) <= DTYPES[dtype]


@pytest.mark.parametrize("shape", [(2, 1, 32, 32, False), (3, 2, 80, 32, False)], ids=str)
def test_the_fused_kernel_quantizes_to_the_same_bits_as_the_twin(shape):
    layers = [Layer(3, shape[1], shape[2], torch.int8) for _ in range(2)]
    for ops, layer in zip((TWIN, TRITON), layers, strict=True):
        Step(torch.float16, *shape).run(ops, layer)
    assert torch.equal(layers[0].kv, layers[1].kv)
    assert torch.equal(layers[0].scales.nan_to_num(7), layers[1].scales.nan_to_num(7))


@BOTH
def test_a_normed_and_quantized_key_is_within_a_step(ops):
    step = Step(torch.float32, 2, 2, 80, 32, True)
    layer = Layer(3, 2, 80, torch.int8)
    step.run(ops, layer)
    expected = all_expected(step)[0, 2:]
    bound = expected.abs().amax(-1, keepdim=True) / 127 * 0.51
    assert bool(((layer.stored(0).flatten(0, 1) - expected).abs() <= bound).all())


def test_a_token_alone_has_the_bits_that_it_has_among_others():
    shape = (4, 2, 32, 32, True)
    together, alone = (Layer(3, 2, 32, torch.int8) for _ in range(2))
    step, single = Step(torch.float32, *shape), Step(torch.float32, *shape)
    step.run(TRITON, together)
    for token in range(3):
        own = slice(token, token + 1)
        slots = Slots(alone.slots.slots[own], BLOCK_SIZE)
        how = (single.norms, EPS, alone.scales)
        TRITON.rope_kv_write(alone.kv, single.qkv[own], single.table, single.positions[own], slots, *how)
    assert torch.equal(step.qkv, single.qkv)
    assert torch.equal(together.kv, alone.kv)
    assert torch.equal(together.scales.nan_to_num(7), alone.scales.nan_to_num(7))


def test_the_norm_comes_before_the_rotation_and_not_on_values():
    """Weights that differ within a pair of columns would show the other order."""
    step, layer = Step(torch.float32, 1, 1, 16, 16, True), Layer(3, 1, 16, torch.float32)
    step.run(TWIN, layer)
    assert torch.equal(layer.stored(0)[1, 0], step.before[0, 2].double())


@settings(max_examples=8, deadline=None)
@given(
    num_tokens=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    head_dim=st.sampled_from([16, 32, 80]),
    half=st.integers(1, 8),
    normed=st.booleans(),
)
def test_drawn_shapes(num_tokens, kv_heads, groups, head_dim, half, normed):
    shape = (kv_heads * groups, kv_heads, head_dim, 2 * half, normed, num_tokens)
    layers = [Layer(num_tokens, kv_heads, head_dim, torch.float32) for _ in range(2)]
    steps = [Step(torch.float32, *shape) for _ in range(2)]
    for ops, step, layer in zip((TWIN, TRITON), steps, layers, strict=True):
        step.run(ops, layer)
    torch.testing.assert_close(steps[1].qkv, steps[0].qkv, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layers[1].kv, layers[0].kv, rtol=1e-6, atol=1e-6, equal_nan=True)


@BOTH
def test_no_tokens_write_nothing(ops):
    kv = torch.zeros((2, 2, 1, BLOCK_SIZE, 16))
    slots = Slots(torch.zeros(0, dtype=torch.int64), BLOCK_SIZE)
    ops.kv_write(kv, torch.zeros(0, 1, 16), torch.zeros(0, 1, 16), slots)
    none = torch.zeros(0, dtype=torch.int64)
    ops.rope_kv_write(kv, torch.zeros(0, 64), angles(4, 16), none, slots)
    assert not bool(kv.any())


def test_a_slot_written_twice_is_refused_in_debug():
    kv, token = torch.zeros((3, 2, 1, BLOCK_SIZE, 16)), torch.zeros(2, 1, 16)
    debug = dispatch.choose(CPU, (), debug=True)
    with pytest.raises(AssertionError, match="twice"):
        debug.kv_write(kv, token, token, Slots(torch.tensor([5, 5]), BLOCK_SIZE))
    debug.kv_write(kv, token, token, Slots(torch.tensor([-1, -1]), BLOCK_SIZE))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv": torch.zeros((3, 2, 1, BLOCK_SIZE, 16), dtype=torch.int8)},  # without scales
        {"scales": torch.zeros((3, 2, 1, BLOCK_SIZE))},  # with scales, though not quantized
        {"key": torch.zeros(2, 1, 32)[..., ::2]},
        {"key": torch.zeros(2, 1, 16, dtype=torch.float16)},
        {"slots": Slots(torch.tensor([4, 5]), 2 * BLOCK_SIZE)},
    ],
    ids=str,
)
def test_an_op_refuses_what_the_kernel_does_not_expect(wrong):
    given = {"kv": torch.zeros((3, 2, 1, BLOCK_SIZE, 16)), "key": torch.zeros(2, 1, 16)}
    given |= {"slots": Slots(torch.tensor([4, 5]), BLOCK_SIZE), "scales": None} | wrong
    with pytest.raises(AssertionError):
        TRITON.kv_write(given["kv"], given["key"], given["key"], given["slots"], given["scales"])


def test_every_head_size_has_a_configuration_that_is_compiled_ahead():
    for capability in (80, 90):
        compiled = {(s.constants["HEADS"], s.num_warps) for s in specimens(capability)}
        for head_dim in checks.SUPPORTED_HEAD_DIMS:
            config = select(capability, head_dim)
            assert (config.heads, config.num_warps) in compiled
