"""Rotary embedding and gated activations: the twins against float64, the Triton kernels against both."""

from __future__ import annotations

import math

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import checks, dispatch
from kernels.triton import pointwise

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"rope", "silu_mul", "gelu_mul"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def table_of(num_positions: int, size: int) -> torch.Tensor:
    angle = torch.randn(num_positions, size // 2, dtype=torch.float64) * 3
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def turned(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """As complex numbers in float64."""
    half = rows.shape[1] // 2
    low, high = slice(0, half), slice(half, 2 * half)
    out = x.double().clone()
    angle = torch.complex(rows[:, None, :half].double(), rows[:, None, half:].double())
    number = torch.complex(out[..., low], out[..., high]) * angle
    out[..., low], out[..., high] = number.real, number.imag
    return out


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "size"), [(3, 32, 32), (17, 16, 16), (2, 80, 80), (1, 96, 24), (2, 64, 2)]
)
def test_heads_turn_as_complex_numbers_do(ops, dtype, in_place, heads, head_dim, size):
    torch.manual_seed(size)
    x = torch.randn(3, heads + 1, head_dim).to(dtype)[:, :heads]  # a part of something wider
    table, positions = table_of(9, size), torch.tensor([8, 0, 3])
    expected = turned(x, table[positions])
    guarded = Guarded((3, heads, head_dim), dtype)
    out = x if in_place else guarded.tensor
    ops.rope(out, x, table, positions)
    guarded.check()
    assert relative_error(out, expected) <= DTYPES[dtype]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


ACTIVATIONS = {"silu_mul": silu, "gelu_mul": gelu}


def gated(name: str, x: torch.Tensor) -> torch.Tensor:
    gate, value = x.double().chunk(2, dim=-1)
    return ACTIVATIONS[name](gate) * value


@BOTH
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 1023, 1024, 1025])
def test_gates_are_those_of_float64(ops, name, dtype, width):
    torch.manual_seed(width)
    x = (torch.randn(2, 2 * width) * 4).to(dtype)
    out = Guarded((2, width), dtype)
    getattr(ops, name)(out.tensor, x)
    out.check()
    assert relative_error(out.tensor, gated(name, x)) <= DTYPES[dtype]


@BOTH
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_of_large_magnitude_stay_finite(ops, name):
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4]])
    out = torch.full_like(gate, float("nan"))
    getattr(ops, name)(out, torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(out, gate.clamp(min=0.0), atol=1e-30, rtol=1e-6)


@BOTH
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [5, 4096, 4097])
def test_eight_bits_are_within_half_a_step_of_their_row(ops, name, width):
    torch.manual_seed(width)
    x = torch.randn(3, 2 * width)
    x[1] = 0.0
    x[2] *= 30
    out, scales = Guarded((3, width), torch.int8), Guarded((3,), torch.float32)
    getattr(ops, name)(out.tensor, x, scales.tensor)
    out.check()
    scales.check()
    expected = gated(name, x)
    assert scales.tensor[1] == 1.0
    assert not bool(out.tensor[1].any())
    error = (out.tensor.double() * scales.tensor[:, None].double() - expected).abs()
    assert bool((error <= expected.abs().amax(-1, keepdim=True) / 127 * 0.501).all())


def test_the_twin_gives_fp8_rows():
    x, out = torch.randn(2, 64), torch.empty(2, 32, dtype=torch.float8_e4m3fn)
    scales = torch.empty(2)
    TWIN.silu_mul(out, x, scales)
    expected = gated("silu_mul", x)
    assert relative_error(out.double() * scales[:, None].double(), expected) <= 1 / 16
    assert out.float().abs().amax(-1).tolist() == [448.0, 448.0]


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 3), st.integers(1, 70), st.sampled_from(list(ACTIVATIONS)))
def test_drawn_gates(num_tokens, width, name):
    x = torch.randn(num_tokens, 2 * width)
    found, expected = torch.empty(num_tokens, width), torch.empty(num_tokens, width)
    getattr(TRITON, name)(found, x)
    getattr(TWIN, name)(expected, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_every_selected_configuration_is_compiled_ahead():
    for capability in (80, 90):
        listed = list(pointwise.specimens(capability))
        heads = {(s.constants.get("HEADS"), s.num_warps) for s in listed}
        blocks = {(s.constants.get("BLOCK"), s.num_warps, "LIMIT" in s.constants) for s in listed}
        for head_dim in checks.SUPPORTED_HEAD_DIMS:
            config = pointwise.select(capability, head_dim)
            assert (config.heads, config.num_warps) in heads
        for quantized in (False, True):
            gate = pointwise.select_gate(capability, quantized)
            assert (gate.block, gate.num_warps, quantized) in blocks
