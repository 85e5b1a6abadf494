"""Compiled products of quantized weights, against float64 and captured in a graph."""

from __future__ import annotations

import pytest
import torch
from cuda_graphs import replayed
from guarded import relative_error
from zero_points import quantized

from kernels import dispatch
from kernels.reference import linear as formats

CUDA = torch.device("cuda")
SHAPES = [(1024, 3072), (4096, 4096), (28672, 4096), (4096, 14336), (1000, 1088)]
TOLERANCE = 1e-2


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(device=CUDA).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def space(rows: int, columns: int, depth: int) -> torch.Tensor:
    return torch.full((formats.workspace_size(rows, columns, depth),), torch.nan, device=CUDA)


def output(rows: int, columns: int) -> torch.Tensor:
    return torch.full((rows, columns), torch.nan, device=CUDA, dtype=torch.bfloat16)


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")


def test_a_row_is_the_same_alone_and_beside_others_bit_for_bit():
    ops, x = dispatch.choose(CUDA), draw(16, 4096)
    weight, scale = formats.quantize_int8(draw(4096, 4096))
    together, alone = output(16, 4096), output(1, 4096)
    ops.weights.linear_w8(together, x, weight, scale)
    for row in (0, 7, 15):
        ops.weights.linear_w8(alone, x[row : row + 1].contiguous(), weight, scale)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_int8_products_are_those_of_float64(rows, columns, depth):
    ops, x = dispatch.choose(CUDA), draw(rows, depth)
    weight, scale = formats.quantize_int8(draw(columns, depth) / depth**0.5)
    expected = x.double() @ (weight.double() * scale.double()[:, None]).T
    out, workspace = output(rows, columns), space(rows, columns, depth)
    found = replayed(lambda: ops.weights.linear_w8(out, x, weight, scale, workspace=workspace), out)
    assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize(("group", "symmetric"), [(32, False), (64, True), (128, True), (128, False)])
def test_int4_products_are_those_of_float64(rows, group, symmetric):
    columns, depth = 4096, 3072
    ops, x = dispatch.choose(CUDA), draw(rows, depth)
    told = quantized(draw(columns, depth) / depth**0.5, group, symmetric)
    order = torch.randperm(depth, device=CUDA).to(torch.int32)
    expected = x[:, order].double() @ formats.dequantize_int4(*told, torch.float64)
    out, workspace = output(rows, columns), space(rows, columns, depth)
    found = replayed(lambda: ops.weights.linear_w4(out, x, *told, order, workspace=workspace), out)
    assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize(("columns", "depth"), SHAPES[:4])
def test_fp8_products_are_those_of_float64(rows, columns, depth):
    needs_fp8()
    ops, (x, x_scale) = dispatch.choose(CUDA), formats.quantize_fp8(draw(rows, depth))
    weight, scale = formats.quantize_fp8(draw(columns, depth) / depth**0.5)
    expected = x.double() @ weight.double().T * x_scale[:, None] * scale
    out, workspace = output(rows, columns), space(rows, columns, depth)
    found = replayed(lambda: ops.weights.linear_fp8(out, x, x_scale, weight, scale, workspace=workspace), out)
    assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize("depth", [64, 1000, 14336])
def test_quantized_tokens_equal_the_twin(depth):
    needs_fp8()
    x = draw(5, depth) * torch.tensor([1.0, 1e3, 0.0, 1e-6, 7.0], device=CUDA).to(torch.bfloat16)[:, None]
    results = []
    for ops in (dispatch.choose(CUDA), dispatch.choose(CUDA, ())):
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scale = torch.empty(5, device=CUDA)
        ops.weights.quantize_tokens(out, scale, x)
        results.append((out.float(), scale))
    (found, scale), (expected, expected_scale) = results
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    # A quotient that lies between two numbers may round either way when the scale differs in the last bit.
    assert float((found != expected).float().mean()) < 0.01
    assert bool(((found - expected).abs() <= expected.abs() / 8 + 2**-9).all())
