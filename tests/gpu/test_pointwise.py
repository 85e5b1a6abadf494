"""Compiled rotary embedding, gates and norms against their twins in float32."""

from __future__ import annotations

import pytest
import torch
from captured import captured

from kernels import dispatch

CUDA = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.mark.parametrize(("heads", "head_dim", "size"), [(32, 128, 128), (14, 64, 64), (32, 80, 32), (16, 256, 64)])
@pytest.mark.parametrize("in_place", [False, True])
def test_heads_turn_as_the_twin_turns_them(heads, head_dim, size, in_place):
    x = torch.randn((500, heads, head_dim), device=CUDA, dtype=BF16)
    angle = torch.randn((4096, size // 2), device=CUDA)
    table = torch.cat((angle.cos(), angle.sin()), dim=1)
    positions = torch.randint(0, 4096, (500,), device=CUDA)
    expected = torch.empty_like(x, dtype=torch.float32)
    dispatch.choose(CUDA, ()).rope(expected, x.float(), table, positions)
    out = x if in_place else torch.full_like(x, float("nan"))
    dispatch.choose(CUDA).rope(out, x, table, positions)
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("width", [1, 1000, 11_008, 28_672])
def test_gates_equal_the_twin(name, width):
    x = 4 * torch.randn((130, 2 * width), device=CUDA, dtype=BF16)
    out = torch.full((130, width), float("nan"), device=CUDA, dtype=BF16)
    expected = torch.empty_like(out, dtype=torch.float32)
    getattr(dispatch.choose(CUDA), name)(out, x)
    getattr(dispatch.choose(CUDA, ()), name)(expected, x.float())
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("width", [1000, 14_336])
def test_quantized_gates_are_within_a_step_of_the_twin(dtype, width):
    if dtype is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no fp8")
    x = torch.randn((130, 2 * width), device=CUDA, dtype=BF16)
    out, scales = torch.zeros((130, width), device=CUDA, dtype=dtype), torch.zeros(130, device=CUDA)
    dispatch.choose(CUDA).silu_mul(out, x, scales)
    expected = torch.empty((130, width), device=CUDA)
    dispatch.choose(CUDA, ()).silu_mul(expected, x.float())
    largest = expected.abs().amax(-1, keepdim=True)
    step = largest / 127 / 2 if dtype is torch.int8 else expected.abs() / 16 + largest / 2**17
    assert bool(((out.float() * scales[:, None] - expected).abs() <= 1.01 * step).all())


@pytest.mark.parametrize("hidden", [128, 300, 1024, 2048, 5120, 16_384, 53_248])
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.int8], ids=str)
def test_norms_of_every_width_equal_the_twin(hidden, gemma, dtype):
    x, residual = torch.randn((2, 33, hidden), device=CUDA, dtype=BF16)
    weight = 1 + torch.randn(hidden, device=CUDA, dtype=BF16) / 4
    results = []
    for ops in (dispatch.choose(CUDA), dispatch.choose(CUDA, ())):
        out, own = torch.zeros_like(x, dtype=dtype), residual.clone()
        scales = torch.zeros(33, device=CUDA) if dtype is torch.int8 else None
        ops.rms_norm(out, x, weight, 1e-6, own, gemma, not gemma, scales)
        results.append((out.float() if scales is None else out.float() * scales[:, None], own))
    assert torch.equal(results[0][1], results[1][1]), "the sum is rounded once"
    largest = float(results[1][0].abs().max())
    error = float((results[0][0] - results[1][0]).abs().max())
    # one step of the output; the normalised row is rounded to bf16 before the product
    assert error <= largest * (2**-7 + (0 if dtype is BF16 else 1 / 127))


def test_a_replayed_chain_reads_new_inputs():
    """Norm with residual, gate and rotation of one decode step."""
    ops, twin = dispatch.choose(CUDA), dispatch.choose(CUDA, ())
    x, residual, out = (torch.randn((16, 4096), device=CUDA, dtype=BF16) for _ in range(3))
    gated = torch.empty((16, 2048), device=CUDA, dtype=BF16)
    weight = torch.rand(4096, device=CUDA).to(BF16) + 0.5
    table = torch.rand((4096, 128), device=CUDA)
    positions = torch.zeros(16, device=CUDA, dtype=torch.int64)

    def step(own: dispatch.Ops, tensors: tuple[torch.Tensor, ...]) -> None:
        own_x, own_residual, own_out, own_gated = tensors
        own.rms_norm(own_out, own_x, weight, 1e-6, own_residual)
        own.silu_mul(own_gated, own_out)
        heads = own_gated.view(16, 16, 128)
        own.rope(heads, heads, table, positions)

    graph = captured(lambda: step(ops, (x, residual, out, gated)))
    for number in range(3):
        x.normal_()
        residual.normal_()
        positions.fill_(number * 100)
        expected = (x.clone(), residual.clone(), torch.empty_like(out), torch.empty_like(gated))
        graph.replay()
        step(twin, expected)
        assert torch.equal(residual, expected[1])
        torch.testing.assert_close(out, expected[2], rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(gated, expected[3], rtol=2**-5, atol=2**-5)
