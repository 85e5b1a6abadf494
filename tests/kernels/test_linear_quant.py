"""Quantized weights: the formats against float64, the products in the interpreter against float64 and the twins."""

from __future__ import annotations

import itertools

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from zero_points import quantized

from kernels import dispatch
from kernels.reference import linear as formats
from kernels.triton.products import linear, linear_quant, partials
from workers.engine.device.self_check import Shapes, checked
from workers.engine.kv.kv_store import KVShape

OPS = ("linear_w8", "linear_w4", "linear_fp8", "linear_w8a8", "quantize_tokens")
TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), set(OPS))
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def weights(columns: int, depth: int) -> torch.Tensor:
    """With a row of zeros, one of one sign, and an outlier."""
    weight = draw(columns, depth) / depth**0.5
    weight[0] = 0
    weight[-1].abs_()
    weight[columns // 2, 0] = 4
    return weight


class TestFormats:
    def test_int8_is_off_by_at_most_half_a_scale(self):
        weight = weights(9, 70)
        numbers, scale = formats.quantize_int8(weight)
        error = (numbers.double() * scale.double()[:, None] - weight.double()).abs()
        assert bool((error <= scale.double()[:, None] * (0.5 + 1e-5)).all())
        assert numbers.abs().max() == 127

    def test_fp8_is_off_by_at_most_a_sixteenth_of_an_element(self):
        weight = weights(9, 70)
        numbers, scale = formats.quantize_fp8(weight)
        found = numbers.double() * scale.double()[:, None]
        bound = torch.maximum(weight.double().abs() / 16, scale.double()[:, None] * 2**-10)
        assert bool(((found - weight.double()).abs() <= bound * (1 + 1e-5)).all())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("group", [32, 64, 128])
    def test_int4_is_off_by_at_most_half_a_scale_and_with_zero_points_a_whole(self, group, symmetric, dtype):
        weight = weights(10, 256).to(dtype)
        packed, scale, zero = quantized(weight, group, symmetric)
        assert packed.shape == (32, 10) and packed.dtype == torch.int32
        assert scale.shape == (256 // group, 10) and scale.dtype == dtype
        found = formats.dequantize_int4(packed, scale, zero, torch.float64)
        error = (found.T - weight.double()).abs()
        bound = scale.double().repeat_interleave(group, 0).T * (0.5 if symmetric else 1)
        assert bool((error <= bound * 1.001).all())

    def test_a_group_that_does_not_divide_the_weight_is_refused(self):
        with pytest.raises(ValueError, match="groups of 128"):
            formats.quantize_int4(draw(4, 192), 128)

    def test_packing_comes_back(self):
        numbers = torch.arange(24 * 5).view(24, 5).to(torch.int32) * 7 % 16
        packed = formats.pack_words(numbers)
        assert packed[0, 0] & 15 == numbers[0, 0] and (packed[0, 0] >> 4) & 15 == numbers[1, 0]
        assert torch.equal(formats.unpack_words(packed), numbers)
        every = torch.full((8, 1), 15, dtype=torch.int32)
        assert formats.pack_words(every).item() == -1

    def test_rows_of_an_activation_order_are_sorted_by_group(self):
        numbers = torch.arange(64 * 3).view(64, 3).to(torch.int32) % 16
        group_ids = torch.arange(64) * 5 % 64 // 32
        packed, order = formats.sort_groups(formats.pack_words(numbers), group_ids)
        assert torch.equal(formats.unpack_words(packed), numbers[order])
        assert group_ids[order].tolist() == [0] * 32 + [1] * 32

    def test_tokens_are_quantized_one_by_one_and_a_zero_row_is_no_trouble(self):
        x = draw(4, 50) * torch.tensor([[1.0], [1000.0], [0.0], [1e-6]])
        out, scale = Guarded((4, 50), torch.float8_e4m3fn), Guarded((4,), torch.float32)
        TWIN.weights.quantize_tokens(out.tensor, scale.tensor, x)
        out.check()
        scale.check()
        found = out.tensor.float() * scale.tensor[:, None]
        assert bool(((found - x).abs() <= x.abs() / 16 + scale.tensor[:, None] * 2**-10).all())

    @pytest.mark.parametrize("depth", [50, 2100])
    def test_int8_tokens_are_off_by_at_most_half_a_scale_also_in_the_kernel(self, depth):
        x = draw(4, depth) * torch.tensor([[1.0], [1000.0], [0.0], [1e-6]])
        for ops in (TWIN, TRITON):
            out, scale = Guarded((4, depth), torch.int8), Guarded((4,), torch.float32)
            ops.weights.quantize_tokens(out.tensor, scale.tensor, x)
            out.check()
            scale.check()
            found = out.tensor.double() * scale.tensor.double()[:, None]
            assert bool(((found - x).abs() <= scale.tensor[:, None] * 0.50001).all())
            assert out.tensor.abs().amax(1).tolist() == [127, 127, 0, 127]

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_kernel_and_twin_round_tokens_by_the_same_divisions(self, dtype, monkeypatch):
        """What the kernel divides by on a GPU is looked at in test_compiled_ahead.py."""
        x, divided = draw(4, 2100), []
        real = formats.torch.Tensor.__truediv__

        def exact(left, right):
            divided.append(type(right))
            return real(left, right)

        monkeypatch.setattr(torch.Tensor, "__truediv__", exact)
        found, scale = (formats.quantize_int8 if dtype == torch.int8 else formats.quantize_fp8)(x)
        assert divided == [torch.Tensor] * 2
        out, own = torch.empty_like(x, dtype=dtype), torch.empty(4)
        TRITON.weights.quantize_tokens(out, own, x)
        assert torch.equal(own, scale)
        # The interpreter's cast to 8-bit floats is wrong where rounding raises the exponent.
        assert dtype != torch.int8 or torch.equal(out, found)

    def test_words_of_8_bits_come_back_and_are_sorted_by_group(self):
        numbers = torch.arange(64 * 5).view(64, 5).to(torch.int32) * 7 % 256
        packed = formats.pack_words(numbers, 8)
        assert packed.shape == (16, 5)
        assert torch.equal(formats.unpack_words(packed, 8), numbers)
        group_ids = torch.arange(64) * 5 % 64 // 32
        sorted_, order = formats.sort_groups(packed, group_ids, 8)
        assert torch.equal(formats.unpack_words(sorted_, 8), numbers[order])


def run(ops, name: str, x: torch.Tensor, columns: int, *told, **options) -> torch.Tensor:
    out = Guarded((len(x), columns), options.pop("dtype", x.dtype))
    getattr(ops.weights, name)(out.tensor, x, *told, **options)
    out.check()
    return out.tensor


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 65], ids=lambda rows: f"{rows} rows")
def test_int8_products_are_those_of_float64(ops, dtype, rows):
    x, bias = draw(rows, 300, dtype=dtype), draw(70, dtype=dtype)
    weight, scale = formats.quantize_int8(weights(70, 300))
    expected = x.double() @ (weight.double() * scale.double()[:, None]).T + bias.double()
    assert relative_error(run(ops, "linear_w8", x, 70, weight, scale, bias), expected) <= DTYPES[dtype]


def rounding(depth: int) -> float:
    """What a float32 sum of so many products may be off by, relative to the sum of their absolute values, in whatever
    order a CPU's library sums: twice sqrt(n) u (Higham and Mary 2019, theorem 2.4; the bound that holds always is n u)."""
    return 2 * depth**0.5 * 2**-24


@BOTH
@pytest.mark.parametrize("rows", [1, 33, 65], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize(
    ("group", "symmetric", "dtype", "ordered"),
    [
        (32, False, torch.float32, True),
        (64, True, torch.bfloat16, False),
        (128, True, torch.float32, True),
        (128, False, torch.float16, False),
    ],
)
def test_int4_products_are_those_of_float64(ops, rows, group, symmetric, dtype, ordered):
    x, bias = draw(rows, 384, dtype=dtype), draw(66, dtype=dtype)
    packed, scale, zero = quantized(weights(66, 384).to(dtype), group, symmetric)
    wide = formats.dequantize_int4(packed, scale, zero, torch.float64)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    expected = (x[:, order] if ordered else x).double() @ wide + bias.double()
    options = {"bias": bias, "order": order if ordered else None}
    found = run(ops, "linear_w4", x, 66, packed, scale, zero, **options)
    if dtype != torch.float32:
        assert relative_error(found, expected) <= DTYPES[dtype]
    else:
        sums = (x[:, order] if ordered else x).double().abs() @ wide.abs() + bias.double().abs()
        assert bool(((found.double() - expected).abs() <= rounding(384) * sums).all())


@BOTH
@pytest.mark.parametrize("rows", [1, 17, 65], ids=lambda rows: f"{rows} rows")
def test_fp8_products_are_those_of_float64(ops, rows):
    x, x_scale = formats.quantize_fp8(draw(rows, 304))
    weight, scale = formats.quantize_fp8(weights(80, 304))
    bias = draw(80, dtype=torch.bfloat16)
    expected = x.double() @ weight.double().T * x_scale[:, None] * scale + bias.double()
    told = (x_scale, weight, scale, bias)
    found = run(ops, "linear_fp8", x, 80, *told, dtype=torch.bfloat16)
    assert relative_error(found, expected) <= 1e-2


def test_many_fp8_rows_in_float32_need_no_library_product_which_refuses_a_bias(monkeypatch):
    def refused(*_, bias, out_dtype, **__):
        assert bias is not None and out_dtype == torch.float32
        raise RuntimeError("Bias is not supported when out_dtype is set to Float32")

    monkeypatch.setattr(torch, "_scaled_mm", refused)
    shapes = Shapes(KVShape(1, 1, 16, 16, torch.float32), torch.float32, 1, 64, 90, ())
    ops = dispatch.choose(torch.device("cpu"), {"linear_fp8"})
    checked_ops, _ = checked(ops, shapes)
    assert checked_ops.chosen["linear_fp8"] is linear_quant.linear_fp8


def test_a_gpu_without_8_bit_floats_takes_the_twin_of_their_product_and_no_other(monkeypatch):
    chosen = {}
    for capability in ((8, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        chosen[capability] = dispatch.choose(torch.device("cuda")).chosen
    assert chosen[8, 0]["linear_fp8"] is dispatch.TWINS["linear_fp8"]
    assert chosen[8, 9]["linear_fp8"] is linear_quant.linear_fp8
    assert chosen[8, 0] | {"linear_fp8": linear_quant.linear_fp8} == chosen[8, 9]


@BOTH
@pytest.mark.parametrize("rows", [1, 17, 65], ids=lambda rows: f"{rows} rows")
def test_products_of_int8_with_int8_are_those_of_float64(ops, rows):
    x, x_scale = formats.quantize_int8(draw(rows, 1304))
    weight, scale = formats.quantize_int8(weights(80, 1304))
    bias = draw(80)
    sums = x.double() @ weight.double().T
    expected = sums * x_scale.double()[:, None] * scale.double() + bias.double()
    told = (x_scale, weight, scale, bias)
    found = run(ops, "linear_w8a8", x, 80, *told, dtype=torch.float32)
    assert relative_error(found, expected) <= 1e-6


@BOTH
@pytest.mark.parametrize("rows", [1, 65], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize(("group", "free", "dtype"), [(32, True, torch.float32), (128, False, torch.bfloat16)])
def test_products_with_grouped_8_bits_are_those_of_float64(ops, rows, group, free, dtype):
    generator = torch.Generator().manual_seed(9)
    x, shape = draw(rows, 256, dtype=dtype), (256 // group, 66)
    numbers = torch.randint(0, 256, (256, 66), generator=generator).to(torch.int32)
    zero = torch.randint(0, 256, shape, generator=generator).to(torch.uint8) if free else None
    scale = (torch.rand(shape, generator=generator) + 0.1).to(dtype)
    order = torch.randperm(256, generator=generator).to(torch.int32)
    offset = zero.double() if free else torch.full(shape, 128.0, dtype=torch.float64)
    wide = numbers - offset.repeat_interleave(group, 0)
    wide *= scale.double().repeat_interleave(group, 0)
    told = (formats.pack_words(numbers, 8), scale, zero, order)
    found = run(ops, "linear_w4", x, 66, *told)
    assert relative_error(found, x[:, order].double() @ wide) <= DTYPES[dtype]


@BOTH
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 1, 1), (15, 31, 127), (16, 32, 128), (3, 33, 129), (1, 65, 511), (2, 16, 1025)]
)
def test_every_edge_of_tiles_and_splits_is_computed(ops, rows, columns, depth):
    x = draw(rows, depth)
    weight, scale = formats.quantize_int8(draw(columns, depth))
    found = run(ops, "linear_w8", x, columns, weight, scale)
    assert relative_error(found, x.double() @ (weight.double() * scale.double()[:, None]).T) <= 1e-6


def test_a_weight_wide_enough_for_one_launch_needs_no_partial_sums(monkeypatch):
    monkeypatch.setattr(partials, "_WANTED_PROGRAMS", 2)
    linear._config.cache_clear()
    x, bias = draw(4, 512), draw(136)
    weight, scale = formats.quantize_int8(weights(136, 512))
    workspace = torch.full((formats.workspace_size(4, 136, 512, torch.float32),), torch.nan)
    found = run(TRITON, "linear_w8", x, 136, weight, scale, bias, workspace=workspace)
    linear._config.cache_clear()
    assert relative_error(found, run(TWIN, "linear_w8", x, 136, weight, scale, bias)) <= 2e-6
    assert bool(workspace.isnan().all())


def test_rows_behind_the_last_are_not_read():
    """Padding of the tile: the next rows of the same buffer hold NaN."""
    longer = torch.full((16, 140), torch.nan)
    longer[:3] = draw(3, 140)
    weight, scale = formats.quantize_int8(weights(33, 140))
    found = run(TRITON, "linear_w8", longer[:3], 33, weight, scale)
    assert relative_error(found, run(TWIN, "linear_w8", longer[:3], 33, weight, scale)) <= 2e-6


@pytest.mark.parametrize("rows", [3, 70])
def test_a_given_workspace_is_used_within_its_size(rows):
    x = draw(rows, 512)
    weight, scale = formats.quantize_int8(weights(40, 512))
    packed, group_scale, zero = quantized(weights(40, 512), 64, False)
    size = formats.workspace_size(rows, 40, 512, torch.float32)
    space = Guarded((size,), torch.float32)
    for name, told in (("linear_w8", (weight, scale)), ("linear_w4", (packed, group_scale, zero))):
        expected = run(TWIN, name, x, 40, *told)
        found = run(TRITON, name, x, 40, *told, workspace=space.tensor)
        assert relative_error(found, expected) <= 2e-6
        space.check()


def test_a_row_is_the_same_whatever_is_beside_it():
    packed, scale, zero = formats.quantize_int4(weights(40, 512), 64)
    x = draw(5, 512)
    together = run(TRITON, "linear_w4", x, 40, packed, scale, zero)
    x[:4] = 7
    assert torch.equal(run(TRITON, "linear_w4", x, 40, packed, scale, zero)[4], together[4])


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 5), st.sampled_from([32, 64, 128]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_drawn_shapes_agree_with_the_twin(rows, columns, num_groups, group, symmetric):
    x = draw(rows, num_groups * group)
    told = quantized(draw(columns, num_groups * group), group, symmetric)
    found = run(TRITON, "linear_w4", x, columns, *told)
    assert relative_error(found, run(TWIN, "linear_w4", x, columns, *told)) <= 2e-6


def test_zero_points_of_another_shape_are_refused():
    packed, scale, zero = quantized(draw(8, 64), 32, False)
    with pytest.raises(AssertionError):
        run(TWIN, "linear_w4", draw(1, 64), 8, packed, scale, zero[:1])


@pytest.mark.parametrize("capability", [80, 90])
def test_every_shape_has_a_configuration_that_is_compiled_ahead(capability):
    compiled = {"8 bit": set(), 4: set(), 8: set()}
    for found in linear_quant.specimens(capability):
        told, launch = found.constants, (found.num_warps, found.num_stages)
        if "GROUP" in told and "BLOCK_M" in told:
            compiled[told["BITS"]].add((told["GROUP"], told["BLOCK_M"], told["BLOCK_N"], *launch))
        elif "BLOCK_M" in told:
            compiled["8 bit"].add((told["BLOCK_M"], told["BLOCK_N"], told["BLOCK_K"], *launch))
    sizes = (1000, 1024, 3072, 4096, 14336, 28672)
    for rows, columns, depth in itertools.product((1, 16, 17, 64), sizes, sizes):
        config = linear.select(capability, rows, columns, depth)
        assert config.tile in compiled["8 bit"]
        assert config.splits <= formats.MAX_SPLITS
        assert linear.split_size(depth, config) * config.splits >= depth
        assert linear.select(capability, 1, columns, depth).splits == config.splits
        for group in formats.GROUPS:
            chosen = linear_quant.select_w4(capability, rows, columns, depth, group)
            assert (group, *chosen.tile) in compiled[4] & compiled[8]
            assert chosen.splits == linear_quant.select_w4(capability, 1, columns, depth, group).splits


def test_the_check_at_start_splits_its_products(monkeypatch):
    """Of few rows; else the second launch, which adds the parts, would be compared with nothing."""
    joined, real = [], linear.join

    def join(*told):
        joined.append(told[-1])
        real(*told)

    monkeypatch.setattr(linear, "join", join)
    shapes = Shapes(KVShape(1, 1, 16, 16, torch.float32), torch.float32, 1, 64, 90, ())
    _, states = checked(dispatch.choose(torch.device("cpu"), {"linear_w8"}), shapes)
    assert joined == [linear.select(90, 5, 96, 1024).splits] == [4]
    assert {state.op for state in states if state.state == "equal"} == {"linear_w8"}


def test_fp8_is_compiled_only_where_the_hardware_has_it():
    assert not any("fp8" in s.name for s in linear_quant.specimens(80))
    assert any("fp8" in s.name for s in linear_quant.specimens(90))
