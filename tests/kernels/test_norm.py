"""RMSNorm: the twin against float64, the Triton kernel in the interpreter against the twin."""

from __future__ import annotations

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.triton.norm import select, specimens

TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), {"rms_norm"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def inputs(num_tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens * 1000 + hidden)
    x, residual = torch.randn((2, num_tokens, hidden), generator=generator).to(dtype)
    return x, residual, (1 + torch.randn(hidden, generator=generator) / 4).to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [16, 63, 64, 65, 300])
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_norm_is_that_of_float64(ops, dtype, hidden, with_residual):
    x, residual, weight = inputs(3, hidden, dtype)
    total = (x + residual if with_residual else x).double()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    out = Guarded((3, hidden), dtype)
    ops.rms_norm(out.tensor, x, weight, 1e-6, residual if with_residual else None)
    out.check()
    assert relative_error(out.tensor, expected) <= DTYPES[dtype]
    if with_residual:
        assert relative_error(residual, total) <= DTYPES[dtype]


def normed(x: torch.Tensor, weight: torch.Tensor, plus_one: bool) -> torch.Tensor:
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return scaled * (weight.double() + plus_one)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 48), (8, 128), (9, 128), (3, 513)])
def test_the_product_in_every_order(ops, dtype, plus_one, cast_first, rows, hidden):
    x, _, weight = inputs(rows, hidden, dtype)
    out = Guarded((rows, hidden), dtype)
    ops.rms_norm(out.tensor, x, weight, 1e-6, plus_one=plus_one, cast_first=cast_first)
    out.check()
    assert relative_error(out.tensor, normed(x, weight, plus_one)) <= DTYPES[dtype]


@pytest.mark.parametrize(("rows", "hidden"), [(9, 128), (3, 300)])
def test_a_row_alone_has_the_bits_that_it_has_among_others(rows, hidden):
    x, _, weight = inputs(rows, hidden, torch.float32)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    TRITON.rms_norm(together, x, weight, 1e-6)
    for row in range(rows):
        TRITON.rms_norm(alone[row : row + 1], x[row : row + 1], weight, 1e-6)
    assert torch.equal(together, alone)


def test_the_product_is_rounded_as_transformers_rounds_it():
    x, _, weight = inputs(3, 64, torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    out = torch.empty_like(x)
    TWIN.rms_norm(out, x, weight, 1e-6)
    assert torch.equal(out, weight * wide.to(torch.bfloat16))  # Llama
    TWIN.rms_norm(out, x, weight, 1e-6, plus_one=True, cast_first=False)
    assert torch.equal(out, (wide * (1.0 + weight.float())).to(torch.bfloat16))  # Gemma


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [16_384, 16_385, 20_480])
@pytest.mark.parametrize("with_residual", [False, True])
def test_huge_rows(ops, dtype, hidden, with_residual):
    x, residual, weight = inputs(2, hidden, dtype)
    total = (x + residual).clone() if with_residual else x
    out = Guarded((2, hidden), dtype)
    ops.rms_norm(out.tensor, x, weight, 1e-6, residual if with_residual else None)
    out.check()
    # the interpreter cuts bf16 instead of rounding it, twice here: the stored sum is read again
    assert relative_error(out.tensor, normed(total, weight, False)) <= 1.5 * DTYPES[dtype]
    if with_residual:
        assert relative_error(residual, total.double()) <= DTYPES[dtype]


@BOTH
@pytest.mark.parametrize(("rows", "hidden"), [(9, 128), (3, 300), (2, 16_385)])
def test_eight_bits_are_within_half_a_step_of_their_row(ops, rows, hidden):
    x, residual, weight = inputs(rows, hidden, torch.float32)
    x[0], residual[0] = 0.0, 0.0
    expected = normed(x + residual, weight, True)
    out, scales = Guarded((rows, hidden), torch.int8), Guarded((rows,), torch.float32)
    ops.rms_norm(out.tensor, x, weight, 1e-6, residual, True, False, scales.tensor)
    out.check()
    scales.check()
    assert scales.tensor[0] == 1.0
    error = (out.tensor.double() * scales.tensor[:, None].double() - expected).abs()
    assert bool((error <= expected.abs().amax(-1, keepdim=True) / 127 * 0.501).all())


def test_the_twin_gives_fp8_rows():
    x, _, weight = inputs(3, 64, torch.bfloat16)
    out, scales = torch.empty(3, 64, dtype=torch.float8_e4m3fn), torch.empty(3)
    TWIN.rms_norm(out, x, weight, 1e-6, out_scales=scales)
    found = out.double() * scales[:, None].double()
    assert relative_error(found, normed(x, weight, False)) <= 1 / 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(2, 16)[:, ::2]},
        {"weight": torch.zeros(9)},
        {"out": torch.zeros(2, 8, dtype=torch.int8)},  # without scales
        {"out_scales": torch.zeros(2)},  # with scales, though not quantized
    ],
    ids=str,
)
def test_an_op_refuses_what_the_kernel_does_not_expect(wrong):
    given = {"out": torch.zeros(2, 8), "x": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": 0}
    with pytest.raises(AssertionError):
        TRITON.rms_norm(**given | wrong)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 9), st.integers(1, 140), st.booleans(), st.booleans())
def test_drawn_shapes(rows, hidden, plus_one, cast_first):
    x, residual, weight = inputs(rows, hidden, torch.float32)
    results = []
    for ops in (TWIN, TRITON):
        out, own = torch.empty_like(x), residual.clone()
        ops.rms_norm(out, x, weight, 1e-6, own, plus_one, cast_first)
        results.append((out, own))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_every_width_has_a_configuration_that_is_compiled_ahead():
    for capability in (80, 90):
        compiled = {
            (s.constants["BLOCK"], s.constants["ROWS"], s.num_warps, "long" in s.kernel.__name__)
            for s in specimens(capability)
        }
        for hidden in (1, 64, 128, 129, 512, 513, 1024, 1536, 2560, 5120, 8192, 8193, 16_384, 2**17):
            config = select(capability, hidden)
            found = (config.block, config.rows, config.num_warps, config.long)
            assert found in compiled, hidden
