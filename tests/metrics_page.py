"""Reads what docs/observability.md says of metrics, and the labels that an expression asks for but its metrics do not
have."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "observability.md").read_text()
ROWS = re.findall(r"^\| `([a-z0-9_:]+)` \| ([^|]*)\|", PAGE, re.MULTILINE)
LABELS = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in ROWS}
NAME = r"(?:headgate_|vllm:|gen_ai_server_|headgate:)[a-zA-Z0-9_:]+"
OF_EVERY_SERIES = {"instance", "job", "le", "gateway"}
OF_PREFIXES = {
    "vllm:": {"model_name", "engine"},
    "gen_ai_server_": {"gen_ai_operation_name", "gen_ai_request_model"},
    "headgate:": {"model", "model_name", "tenant", "currency"},
}
"""The labels that the page states once for all families of a prefix; the last one has what rules record."""


def family_of(name: str) -> str:
    if name in LABELS:
        return name
    for suffix in ("_total", "_info", "_bucket", "_sum", "_count"):
        if name.removesuffix(suffix) in LABELS:
            return name.removesuffix(suffix)
    return name


def labels_of(name: str) -> set[str]:
    prefixed = [labels for prefix, labels in OF_PREFIXES.items() if name.startswith(prefix)]
    return OF_EVERY_SERIES.union(LABELS.get(family_of(name), set()), *prefixed)


def foreign_labels(expression: str) -> set[str]:
    """Returns the labels by which an expression selects or groups although no metric in it has them. A selector is held
    against its own metric, a grouping against all metrics of the expression.
    """
    allowed = OF_EVERY_SERIES.union(*(labels_of(name) for name in re.findall(NAME, expression)))
    grouped = [label for labels in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in labels.split(", ")]
    foreign = set(grouped) - allowed
    for name, selector in re.findall(rf"({NAME}|\bup)\{{([^}}]*)\}}", expression):
        foreign |= set(re.findall(r"(?:^|,)\s*(\w+)\s*(?:=~|!~|!=|=)", selector)) - labels_of(name)
    return foreign
