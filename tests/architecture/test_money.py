"""Money is integers: no float can enter the modules that compute, keep or report it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "accounting"
MODULES = (
    "pricing",
    "prices",
    "ledger",
    "request_postings",
    "legs",
    "write_offs",
    "rollups",
    "books",
    "reports",
    "types",
    "models",
    "budget_types",
    "budget_models",
    "budgets",
    "spend",
    "invoice_models",
    "invoice_lines",
    "invoices",
    "credits",
    "grants",
    "invoice_numbers",
    "periods",
    "repricing",
    "rerating",
    "price_lists",
    "books_billing",
    "exports",
    "focus",
    "causes",
    "period_sums",
    "forecasts",
    "summaries",
    "caps",
    "previews",
)
# A scheduling weight is no money.
NOT_MONEY = {"weight: float = 1.0"}


def floats(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node) in NOT_MONEY
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, float | complex):
            yield f"line {node.lineno}: literal {node.value}"
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in ("float", "sa.Float", "Float", "REAL"):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            yield f"line {node.lineno}: true division"


@pytest.mark.parametrize("module", MODULES)
def test_no_float_in_money_modules(module):
    assert list(floats(next(ROOT.rglob(f"{module}.py")).read_text())) == []


@pytest.mark.parametrize("line", ["x = 0.5", "x = float(y)", "x = a / b", "x /= 2", "x: float", "x = 1e6"])
def test_the_guard_sees_each_way_in(line):
    assert list(floats(line))
