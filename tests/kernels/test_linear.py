"""Products of few rows: the twin against float64, the Triton kernel in the interpreter against both."""

from __future__ import annotations

import itertools

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.reference.linear import MAX_SPLITS, workspace_size
from kernels.triton.products import linear, partials

TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), {"linear_small"})
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
OPTIONS = [
    {},
    {"bias": True},
    {"norm": True, "bias": True},
    {"gated": True, "bias": True},
    {"norm": True, "gated": True, "residual": True},
    {"residual": True, "bias": True},
]


def inputs(rows: int, columns: int, depth: int, dtype: torch.dtype, **wanted: bool) -> dict:
    """Everything that `linear_small` takes, except `out`."""
    generator = torch.Generator().manual_seed(rows * 7919 + columns * 31 + depth)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    gated = wanted.get("gated", False)
    width = columns // 2 if gated else columns
    given = {"x": draw(rows, depth), "weight": draw(columns, depth) / depth**0.5, "gated": gated}
    if wanted.get("bias"):
        given["bias"] = draw(columns)
    if wanted.get("norm"):
        given["norm"] = 1 + draw(depth) / 4
        given["x"] *= 3
    if wanted.get("residual"):
        given["residual"] = draw(rows, width)
    return given


def exact(given: dict) -> torch.Tensor:
    wide = {k: v.double() for k, v in given.items() if isinstance(v, torch.Tensor)}
    x = wide["x"]
    if "norm" in wide:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide["norm"]
    result = x @ wide["weight"].T + wide.get("bias", 0)
    if given["gated"]:
        gate, up = result.chunk(2, -1)
        result = gate / (1 + (-gate).exp()) * up
    return result + wide.get("residual", 0)


def run(ops: dispatch.Ops, given: dict, workspace: torch.Tensor | None = None) -> torch.Tensor:
    columns = len(given["weight"]) // (2 if given["gated"] else 1)
    out = Guarded((len(given["x"]), columns), given["x"].dtype)
    ops.weights.linear_small(out.tensor, **given, workspace=workspace)
    out.check()
    return out.tensor


@BOTH
@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(d, w) for d in DTYPES for w in OPTIONS if d != torch.float16 or not w.get("norm")],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else " ".join(value) or "plain",
)
def test_the_product_is_that_of_float64(ops, dtype, wanted):
    given = inputs(5, 34, 600, dtype, **wanted)
    assert relative_error(run(ops, given), exact(given)) <= DTYPES[dtype]


@BOTH
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 1, 1), (15, 31, 127), (16, 32, 128), (3, 33, 129), (1, 65, 511), (2, 16, 1025)]
)
def test_every_edge_of_tiles_and_splits_is_computed(ops, rows, columns, depth):
    given = inputs(rows, columns, depth, torch.bfloat16)
    assert relative_error(run(ops, given), exact(given)) <= 1e-2


@pytest.mark.parametrize("wanted", [{}, {"norm": True, "gated": True}], ids=["plain", "gated"])
def test_a_weight_wide_enough_for_one_launch_needs_no_partial_sums(monkeypatch, wanted):
    monkeypatch.setattr(partials, "_WANTED_PROGRAMS", 2)
    linear._config.cache_clear()
    given = inputs(4, 136, 512, torch.float32, **wanted)
    workspace = torch.full((workspace_size(4, 136, 512),), torch.nan)
    found = run(TRITON, given, workspace)
    linear._config.cache_clear()
    assert relative_error(found, exact(given)) <= 1e-6
    assert bool(workspace.isnan().all())


def test_a_workspace_is_filled_within_its_size():
    given = inputs(3, 40, 1024, torch.float32, norm=True)
    workspace = Guarded((workspace_size(3, 40, 1024),), torch.float32)
    assert relative_error(run(TRITON, given, workspace.tensor), exact(given)) <= 1e-6
    workspace.check()


def test_a_row_is_the_same_whatever_is_beside_it():
    """In its place of the tile: the interpreter's own product differs in the last bit between places."""
    given = inputs(7, 40, 600, torch.float32, norm=True)
    together = run(TRITON, given)
    for row in (0, 6):
        others = torch.randn((row + 1, 600), generator=torch.Generator().manual_seed(row))
        others[row] = given["x"][row]
        assert torch.equal(run(TRITON, given | {"x": others})[row], together[row])


def test_the_residual_may_be_the_output():
    given = inputs(3, 40, 300, torch.float32, residual=True)
    expected = exact(given)
    TRITON.weights.linear_small(given["residual"], **given)
    assert relative_error(given["residual"], expected) <= 1e-6


def test_rows_behind_the_last_are_not_read():
    """Padding of the tile: the next rows of the same buffer hold NaN."""
    given = inputs(3, 33, 140, torch.float32, norm=True)
    longer = torch.full((16, 140), torch.nan)
    longer[:3] = given["x"]
    found = run(TRITON, given | {"x": longer[:3]})
    assert relative_error(found, exact(given)) <= 1e-6


@given(st.integers(1, 16), st.integers(1, 70), st.integers(1, 520), st.sampled_from(OPTIONS))
@settings(max_examples=12, deadline=None)
def test_drawn_shapes_agree_with_the_twin(rows, columns, depth, wanted):
    columns += columns % 2
    given = inputs(rows, columns, depth, torch.float32, **wanted)
    assert relative_error(run(TRITON, given), run(TWIN, given)) <= 2e-6


def test_a_norm_in_half_precision_is_refused():
    given = inputs(1, 8, 8, torch.float16, norm=True)
    with pytest.raises(AssertionError):
        run(TWIN, given)


@pytest.mark.parametrize("capability", [80, 90])
def test_every_shape_has_a_configuration_that_is_compiled_ahead(capability):
    compiled = {
        (s.constants["BLOCK_M"], s.constants["BLOCK_N"], s.constants["BLOCK_K"], s.num_warps, s.num_stages)
        for s in linear.specimens(capability)
        if "BLOCK_M" in s.constants
    }
    sizes = (64, 1000, 1024, 2048, 3072, 4096, 14336, 28672, 151_936)
    for rows, columns, depth in itertools.product((1, 2, 15, 16), sizes, sizes[:7]):
        for gated in (False, True):
            config = linear.select(capability, rows, columns, depth, gated, 2)
            assert config.tile in compiled
            assert config.splits <= MAX_SPLITS
            assert linear.split_size(depth, config) * config.splits >= depth
            assert linear.select(capability, 1, columns, depth, gated, 2).splits == config.splits
