"""Products in panels: against float64, for every number of rows that a tile takes, and a row beside others."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu import compiled

if reason := compiled.refusal():
    pytest.skip(reason, allow_module_level=True)

from kernels.cpu import panels, tiles
from kernels.cpu.emit import has_bf16_products
from kernels.cpu.panels import Panels
from kernels.cpu.product import FLOATS, PAIRED, TILED, WIDENED

KINDS = [FLOATS, WIDENED, PAIRED, TILED]
EACH = pytest.mark.parametrize("kind", KINDS, ids=["floats", "widened", "paired", "tiled"])


@pytest.fixture(autouse=True)
def _instructions(request: pytest.FixtureRequest) -> None:
    if "paired" in request.node.name and not has_bf16_products():
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    if "tiled" in request.node.name and not tiles.are_there():
        pytest.skip("this CPU has no matrix unit")


def packed(out_features: int, in_features: int, kind: int) -> tuple[torch.Tensor, Panels]:
    generator = torch.Generator().manual_seed(out_features + in_features)
    dtype = torch.float32 if kind == FLOATS else torch.bfloat16
    weight = torch.randn((out_features, in_features), generator=generator).to(dtype)
    return weight, panels.pack(weight, kind)


def rows(number: int, weight: Panels) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn((number, weight.in_features), generator=generator).to(weight.input_dtype)


@EACH
@pytest.mark.parametrize("sizes", [(64, 32), (1, 32), (65, 96), (300, 128), (128, 1024)], ids=str)
def test_a_product_is_that_of_float64(kind: int, sizes: tuple[int, int]) -> None:
    weight, tiles = packed(*sizes, kind)
    for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 33):
        x = rows(number, tiles)
        found = panels.product(x, tiles)
        expected = x.double() @ weight.double().T
        assert found.shape == expected.shape
        assert found.dtype == torch.float32
        limit = 2e-6 * (x.double().abs() @ weight.double().abs().T)
        assert ((found - expected).abs() <= limit).all()


class Made(TorchDispatchMode):
    """The names of operations that take memory for their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
            self.names.append(str(func))
        return found


@EACH
def test_a_large_weight_is_packed_in_the_memory_of_its_panels_alone(kind: int) -> None:
    """`in_large_pages` maps that memory itself."""
    dtype = torch.float32 if kind == FLOATS else torch.bfloat16
    weight = torch.zeros((1024, 1024), dtype=dtype)
    with Made() as made:
        panels.pack(weight, kind)
    assert made.names == []


@EACH
def test_a_row_has_the_same_bits_among_any_others_and_on_two_threads(kind: int) -> None:
    _, tiles = packed(200, 96, kind)
    x = rows(37, tiles)
    together = panels.product(x, tiles)
    for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 33):
        for start in range(0, 38 - number):
            some = panels.product(x[start : start + number], tiles)
            assert torch.equal(some, together[start : start + number])
    torch.set_num_threads(2)
    assert torch.equal(panels.product(x, tiles), together)
    torch.set_num_threads(1)


@EACH
def test_a_number_that_is_none_stays_in_its_row_and_its_output(kind: int) -> None:
    weight, _ = packed(130, 32, kind)
    weight[70, 5] = float("inf")
    tiles = panels.pack(weight, kind)
    x = rows(6, tiles)
    x[2, 7] = float("nan")
    found = panels.product(x, tiles)
    assert found[2].isnan().all()
    others = found[[0, 1, 3, 4, 5]]
    assert others[:, 70].isinf().all()
    assert others[:, :70].isfinite().all() and others[:, 71:].isfinite().all()


@pytest.mark.parametrize("kind", [FLOATS, WIDENED, PAIRED], ids=["floats", "widened", "paired"])
def test_sixteen_inputs_are_enough_outside_the_matrix_unit(kind: int) -> None:
    weight, tiles = packed(65, 48, kind)
    x = rows(9, tiles)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(panels.product(x, tiles).double(), expected, atol=1e-4, rtol=1e-4)


def test_no_rows_have_no_product() -> None:
    _, tiles = packed(64, 16, FLOATS)
    assert panels.product(torch.empty((0, 16)), tiles).shape == (0, 64)
