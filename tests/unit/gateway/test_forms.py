"""O9: a value of another form is told in words, never by a pattern."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, get_type_hints

import msgspec
import pytest

import gateway.schema
from gateway.base.errors import ApiError
from gateway.schema import forms
from gateway.schema.convert import convert
from gateway.schema.invoices import NewInvoice
from gateway.schema.upstreams import NewUpstream, source_of

FOLDER = Path(next(iter(gateway.schema.__path__)))


@pytest.mark.parametrize("pattern", forms.WORDS)
def test_o9_each_pattern_has_words(pattern):
    kind = Annotated[str, msgspec.Meta(pattern=pattern)]
    fields = msgspec.defstruct("Fields", [("name", kind)])
    with pytest.raises(ApiError) as refused:
        convert({"name": "\n"}, fields)
    assert refused.value.message == f"Invalid value for 'name': it must be {forms.WORDS[pattern]}."


def test_o9_no_field_of_a_body_has_a_pattern_without_words():
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "pattern":
                named = isinstance(node.value, ast.Attribute)
                found.add(getattr(forms, node.value.attr) if named else ast.literal_eval(node.value))
    assert len(found) >= 7
    assert found <= set(forms.WORDS)


@pytest.mark.parametrize("period", ["2026-13", "10-2026", "2026-10\n", ""])
def test_o9_a_wrong_period_is_told_how_one_is_written(period):
    assert get_type_hints(NewInvoice)["period"]
    with pytest.raises(ApiError) as refused:
        convert({"period": period}, NewInvoice)
    assert "a month, written like 2026-10" in refused.value.message
    assert "regex" not in refused.value.message
    assert refused.value.param == "period"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"url": "ftp://u:secret@a"},
            "Invalid value for 'url': it must be a base URL like https://api.example.com/v1, without user, query or"
            " fragment, not 'ftp://u:***@a'.",
        ),
        (
            {"kind": "azure", "costs": {}},
            "The upstream cannot be used: no costs can be read of the kind azure: only of openai and anthropic.",
        ),
        (
            {"costs": {"project": "proj_1"}},
            "Costs are read with a credential of their own: give it as 'cost_credential'.",
        ),
        ({"rank": 7000}, "Invalid value for 'rank': it should be less than or equal to 1000."),
    ],
)
def test_what_an_upstream_cannot_have_is_told_with_its_field(change, said):
    with pytest.raises(ApiError) as refused:
        source_of(NewUpstream(**{"name": "x", "url": "https://a.example", "models": {"a": {}}} | change))
    assert refused.value.message == said
