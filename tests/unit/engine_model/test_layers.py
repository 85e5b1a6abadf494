"""Packed linears and the KV store's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernels import dispatch
from kernels.cpu import compiled, instructions
from workers.engine.kv.kv_store import KVShape, KVStore, plan_num_blocks
from workers.engine.layers import linear
from workers.engine.layers.linear import MIN_ROWS, PackedLinear, pack_linears
from workers.engine.sizing.capacity import Need
from workers.engine.values.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


KINDS = ("avx2", "avx512", "avx512_bf16", "amx")
OF_PROCESS = instructions.kind()


@pytest.fixture
def as_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Takes a kind of CPU, which the following choices are made for."""

    def take(kind: str) -> None:
        monkeypatch.setenv(instructions.VARIABLE, kind)
        forget()

    yield take
    monkeypatch.undo()
    forget()


def forget() -> None:
    for known in (instructions.has, linear._pairs, compiled.functions):
        known.cache_clear()
    if not compiled.refusal():
        from kernels.cpu import tiles  # needs numba

        tiles.are_there.cache_clear()


@pytest.fixture
def without_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the compiled product cannot be had."""
    monkeypatch.setattr(linear, "_has_panels", lambda weight: False)


def weight_of(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out_features)
    return (torch.randn((out_features, in_features), generator=generator) * 0.05).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 4, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(301, 64), (96, 1536)])
@pytest.mark.usefixtures("without_panels")
def test_a_packed_linear_gives_the_bits_of_the_plain_one_in_bfloat16(
    out_features: int, in_features: int, rows: int
) -> None:
    weight = weight_of(out_features, in_features, torch.bfloat16)
    if not isinstance(PackedLinear(weight, None).product, linear.OneDnnProduct):
        pytest.skip("this CPU multiplies bfloat16 in float32, or not with oneDNN")
    bias = weight[:, 0].clone()
    x = weight_of(rows, in_features, torch.bfloat16)
    assert torch.equal(PackedLinear(weight, bias)(x), F.linear(x, weight, bias))


@pytest.mark.parametrize("in_features", [64, 1536])
def test_a_packed_linear_is_the_plain_one_in_float32_up_to_the_order_of_sums(in_features: int) -> None:
    weight = weight_of(96, in_features, torch.float32)
    x = weight_of(7, in_features, torch.float32)
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(PackedLinear(weight, None)(x).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [64, 1024, 2048])
@pytest.mark.parametrize("in_panels", [False, True])
def test_a_row_has_the_same_bits_among_any_number_of_others(
    monkeypatch: pytest.MonkeyPatch, in_panels: bool, in_features: int, dtype: torch.dtype
) -> None:
    """From MIN_ROWS on: this is what makes a token independent of the batch around it on a CPU."""
    if not in_panels:
        monkeypatch.setattr(linear, "_has_panels", lambda weight: False)
    weight = weight_of(96, in_features, dtype)
    if not linear.can_pack(weight):
        pytest.skip("this CPU has no such products in oneDNN")
    layer = PackedLinear(weight, None)
    x = weight_of(130, in_features, dtype)
    alone = layer(x[:MIN_ROWS])
    for rows in (MIN_ROWS + 1, 8, 17, 64, 130):
        assert torch.equal(layer(x[:rows])[:MIN_ROWS], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_product_is_that_of_float32_whatever_the_input_is(dtype: torch.dtype) -> None:
    needs_fbgemm()
    weight = weight_of(301, 1536, dtype)
    product, bias = linear.HalfProduct(weight), weight[:, 0].clone()
    x = weight_of(9, 1536, torch.float32)
    expected = x.double() @ weight.double().T + bias.double()
    found = product(x, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(product(x.to(dtype), bias), product(x.to(dtype).float(), bias).to(dtype))


@pytest.mark.parametrize("in_features", [48, 768, 2560])
def test_a_widened_row_has_the_same_bits_alone_among_others_and_on_more_threads(in_features: int) -> None:
    """So a pass of such products needs no filling, and threads may change from step to step."""
    needs_fbgemm()
    product = linear.HalfProduct(weight_of(321, in_features, torch.bfloat16))
    x = weight_of(130, in_features, torch.float32)
    whole = product(x, None)
    for rows in (1, 2, 3, 7, 14, 15, 64, 129):
        assert torch.equal(product(x[:rows], None), whole[:rows])
        assert torch.equal(product(x[-rows:], None), whole[-rows:])
    torch.set_num_threads(2)
    assert torch.equal(product(x, None), whole)


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1e-2, True), (1e-4, False), (1e7, False)])
@pytest.mark.usefixtures("without_panels")
def test_a_weight_is_widened_only_if_float16_holds_it(
    monkeypatch: pytest.MonkeyPatch, factor: float, fits: bool
) -> None:
    needs_fbgemm()
    monkeypatch.setattr(linear, "widens", lambda dtype: dtype == torch.bfloat16)
    weight = (weight_of(64, 64, torch.float32) * factor).to(torch.bfloat16)
    assert isinstance(linear.product_of(weight), linear.HalfProduct) is fits


def needs_fbgemm() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no FBGEMM")


def test_a_product_in_panels_rounds_once_and_adds_the_bias_before() -> None:
    needs_panels()
    weight = weight_of(301, 1536, torch.bfloat16)
    product, bias = linear.PanelProduct(weight), weight[:, 0].clone()
    assert product.num_bytes == weight.nbytes
    x = weight_of(9, 1536, product.panels.input_dtype)
    wide = product(x.float(), bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(wide.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(product(x.bfloat16(), bias), product(x.bfloat16().float(), bias).bfloat16())


def test_a_product_is_chosen_by_what_this_cpu_has() -> None:
    """Row T1: whichever CPU runs the tests, and whatever is hidden of it."""
    weight = weight_of(64, 64, torch.bfloat16)
    product = linear.product_of(weight)
    if not compiled.refusal():
        assert isinstance(product, linear.PanelProduct)
        assert product.is_wide is (product.panels.input_dtype == torch.float32)
    elif linear.widens(torch.bfloat16):
        assert isinstance(product, linear.HalfProduct)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # The kernels are compiled anew for each kind.
        pytest.param("amx", linear.PanelProduct, marks=pytest.mark.rest),
        pytest.param("avx512_bf16", linear.PanelProduct, marks=pytest.mark.rest),
        pytest.param("avx512", linear.PanelProduct, marks=pytest.mark.rest),
        ("avx2", linear.HalfProduct),
    ],
)
def test_a_kind_of_cpu_that_is_asked_for_chooses_its_product(
    as_on: Callable[[str], None], kind: str, expected: type
) -> None:
    needs_panels()
    needs_fbgemm()
    if OF_PROCESS != "auto" and KINDS.index(kind) > KINDS.index(OF_PROCESS):
        pytest.skip(f"this process has compiled its kernels as on {OF_PROCESS}")
    as_on(kind)
    weight, x = weight_of(64, 64, torch.bfloat16), weight_of(5, 64, torch.bfloat16)
    product = linear.product_of(weight)
    assert type(product) is expected
    torch.testing.assert_close(product(x, None), F.linear(x, weight), atol=2e-2, rtol=2e-2)
    if kind == "avx512":
        assert product.is_wide, "pairs of bfloat16 are hidden"
    wide = linear.product_of(weight.float())
    assert type(wide) is (linear.OneDnnProduct if kind == "avx2" else linear.PanelProduct)


@pytest.mark.parametrize("shape", [(64, 24), (64, 8)])
def test_a_weight_that_does_not_fall_on_whole_registers_is_left_to_the_library(shape: tuple[int, int]) -> None:
    product = linear.product_of(weight_of(*shape, torch.float32))
    assert not isinstance(product, linear.PanelProduct)


def needs_panels() -> None:
    if reason := compiled.refusal():
        pytest.skip(reason)


def test_without_onednn_the_plain_product_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    weight, x = weight_of(5, 8, torch.float32), weight_of(3, 8, torch.float32)
    assert torch.equal(PackedLinear(weight, None)(x), F.linear(x, weight))


def test_every_linear_is_replaced_and_its_weight_let_go() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 4, bias=False)), nn.ReLU())
    model.requires_grad_(False)
    x = torch.ones(2, 8)
    expected = model(x)
    assert pack_linears(model) == 2
    torch.testing.assert_close(model(x), expected)
    assert [name for name, _ in model.named_parameters()] == ["0.bias"]


SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)


def test_a_block_takes_keys_and_values_of_every_layer() -> None:
    assert SHAPE.bytes_per_block == 3 * 2 * 2 * 64 * 16 * 2
    store = KVStore(SHAPE, 5, CPU, dispatch.choose(CPU))
    assert store.tensor.nbytes == 5 * SHAPE.bytes_per_block
    assert store.layer(1)[0].shape == (5, 2, 2, 16, 64)


NEED = Need(1 << 20, SHAPE.bytes_per_block, 16, 16)


def test_blocks_fill_the_given_memory_and_no_more() -> None:
    memory = 10 * SHAPE.bytes_per_block + 1
    assert plan_num_blocks(NEED, CPU, 2048, memory) == 10
    with pytest.raises(ModelError, match=r"one sequence of 16 tokens .*, and has 1\.02 MiB"):
        plan_num_blocks(NEED, CPU, 2048, SHAPE.bytes_per_block)


def test_a_cpu_takes_a_bounded_share_by_itself() -> None:
    blocks = plan_num_blocks(NEED, CPU, 64)
    assert blocks <= 1 + 256 * 4
    assert plan_num_blocks(NEED, CPU, 1 << 20) * SHAPE.bytes_per_block <= 2 << 30


def test_copied_blocks_are_equal_in_every_layer() -> None:
    store = KVStore(SHAPE, 6, CPU, dispatch.choose(CPU))
    store.tensor.copy_(torch.randn(store.tensor.shape))
    before = store.tensor.clone()
    store.copy_blocks([(1, 4), (2, 5)])
    assert torch.equal(store.tensor[:, :4], before[:, :4])
    assert torch.equal(store.tensor[:, 4:], before[:, 1:3])
    store.copy_blocks([])
