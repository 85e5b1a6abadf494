"""Writes the dashboards as Grafana reads them: ops/grafana/*.json. The tables beside this module say what is on them.

`make dashboards` writes the files; a test fails when they are not current.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from ops.dashboards.cache import CACHE
from ops.dashboards.engine import ENGINE, FAIRNESS
from ops.dashboards.jobs import JOBS
from ops.dashboards.overview import OVERVIEW
from ops.dashboards.panels import VARIABLES, Dashboard, Panel
from ops.dashboards.tenants import TENANTS
from ops.dashboards.upstreams import UPSTREAMS

FOLDER = Path(__file__).resolve().parents[1] / "grafana"
DASHBOARDS = (OVERVIEW, TENANTS, CACHE, JOBS, ENGINE, FAIRNESS, UPSTREAMS)
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 7
"""Panels in a row, and the size of each in cells of Grafana's grid, which is 24 cells wide."""


def files() -> dict[Path, str]:
    """Returns the text of each file."""
    return {FOLDER / f"{one.uid}.json": json.dumps(rendered(one), indent=1) + "\n" for one in DASHBOARDS}


def rendered(dashboard: Dashboard) -> dict[str, Any]:
    numbers, panels, top = count(1), list[dict[str, Any]](), 0
    for row in dashboard.rows:
        place = {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": top}
        panels.append({"id": next(numbers), "type": "row", "title": row.title, "collapsed": False, "gridPos": place})
        top += 1
        for index, panel in enumerate(row.panels):
            x, y = index % COLUMNS * WIDTH, top + index // COLUMNS * HEIGHT
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y}
            panels.append({"id": next(numbers), "gridPos": place, **_panel(panel)})
        top += -(-len(row.panels) // COLUMNS) * HEIGHT
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["headgate"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *(_variable(name) for name in dashboard.variables)]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query.expression.replace("$rate", "$__rate_interval"),
                "legendFormat": query.legend,
                "exemplar": "_bucket" in query.expression and panel.kind == "timeseries",
                **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
                **({"format": "table", "instant": True} if panel.kind == "table" else {}),
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Blues"}}
    if panel.kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {}


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": VARIABLES[name], "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
