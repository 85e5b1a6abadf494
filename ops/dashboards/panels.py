"""The parts of a dashboard. Each dashboard is a table that has, for each panel, its title, its unit and its expressions.

`$rate` stands for Grafana's `$__rate_interval`, which is wide enough for two scrapes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["timeseries", "stat", "heatmap", "table"]


class Query(NamedTuple):
    expression: str
    legend: str = ""


class Panel(NamedTuple):
    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    text: str = ""
    """The facts that a reader has to know to understand the panel."""


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


class Dashboard(NamedTuple):
    uid: str
    title: str
    rows: tuple[Row, ...]
    variables: tuple[str, ...] = ()
    """Names of the variables of `VARIABLES` that the expressions use."""


VARIABLES = {
    "model": "label_values(headgate_ready_workers, model)",
    "model_name": "label_values(vllm:num_requests_running, model_name)",
    "tenant": "label_values(headgate_tokens_total, tenant)",
}
"""The query that lists the values of each variable. Each variable may take several values, or all."""


def panel(title: str, unit: str, *queries: str | tuple[str, str], kind: Kind = "timeseries", text: str = "") -> Panel:
    """Makes a panel of expressions, or of pairs (expression, legend)."""
    return Panel(title, unit, tuple(Query(q) if isinstance(q, str) else Query(*q) for q in queries), kind, text)


def quantiles(title: str, histogram: str, by: str = "", *, where: str = "") -> Panel:
    """Makes a panel with the median, p95 and p99 of a histogram of seconds."""
    labels = f"{by}, le" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = f"sum by ({labels}) (rate({histogram}_bucket{where}[$rate]))"
    shown = (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99"))
    return panel(title, "s", *((f"histogram_quantile({q}, {buckets})", legend + name) for q, name in shown))


def heatmap(title: str, unit: str, histogram: str, *, where: str = "", text: str = "") -> Panel:
    expression = f"sum by (le) (increase({histogram}_bucket{where}[$rate]))"
    return panel(title, unit, (expression, "{{le}}"), kind="heatmap", text=text)
