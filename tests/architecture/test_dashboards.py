"""Dashboards and rules: files are current, expressions name metrics and labels that exist, each alert has a test and a
runbook.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from metrics_page import LABELS, NAME, family_of, foreign_labels
from prometheus_server import RULES, program

from gateway.telemetry import names
from gateway.telemetry.metrics import RUN

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from ops.dashboards import build  # noqa: E402  # the folder is found once the root is on the path

RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()


@functools.cache
def rules() -> list[dict]:
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict]:
    return [rule for rule in rules() if "alert" in rule]


def expressions() -> list[str]:
    panels = [panel for one in build.DASHBOARDS for row in one.rows for panel in row.panels]
    return [query.expression for panel in panels for query in panel.queries] + [rule["expr"] for rule in rules()]


def unit_tests() -> list[dict]:
    return [test for path in rule_tests() for test in yaml.safe_load(path.read_text())["tests"]]


def rule_tests() -> list[Path]:
    return sorted((RULES.parent / "tests").glob("*.yml"))


def test_the_files_are_current():
    wanted = build.files()
    assert set(build.FOLDER.glob("*.json")) == set(wanted)
    for path, text in wanted.items():
        assert path.read_text() == text, f"{path.name} is old: run `make dashboards`"


@pytest.mark.parametrize("dashboard", build.DASHBOARDS, ids=lambda one: one.uid)
def test_a_dashboard_is_whole(dashboard):
    shown = build.rendered(dashboard)
    ids = [panel["id"] for panel in shown["panels"]]
    assert len(ids) == len(set(ids))
    cells = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in shown["panels"]}
    assert len(cells) == len(ids), "two panels lie on each other"
    used = set(re.findall(r"\$(\w+)", json.dumps([p.get("targets", []) for p in shown["panels"]]))) - {
        "__rate_interval"
    }
    assert used == set(dashboard.variables)


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_what_exists(expression):
    """Names and labels are on the page of metrics, which the live test compares with real processes."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = re.findall(NAME, expression)
    assert named or expression.startswith("up{")
    for name in named:
        if name.startswith("headgate:"):
            assert name in recorded
        else:
            assert family_of(name) in LABELS, f"{name} is not on docs/observability.md"
    assert foreign_labels(expression) == set()


def test_the_error_budget_is_of_every_route_that_answers():
    found = [route for expression in expressions() for route in re.findall(r'route=~"([^"]*)"', expression)]
    assert len(found) == 10
    for pattern in found:
        matched = {route for route in [*names.OPERATIONS, RUN, "GET /v1/responses"] if re.fullmatch(pattern, route)}
        assert matched == set(names.OPERATIONS)


def test_counters_are_only_read_as_rates():
    """A counter's own value begins anew with each process, so it says nothing."""
    for expression in expressions():
        for counter in re.finditer(r"(?:headgate_|vllm:)\w+_total\b", expression):
            if counter[0] != "vllm:iteration_tokens_total":
                assert re.search(r"(?:rate|increase)\($", expression[: counter.start()]), expression


def test_every_alert_says_how_bad_it_is_and_where_its_runbook_is():
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names)) > 25
    for alert in alerts():
        assert alert["labels"]["severity"] in ("page", "ticket")
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page.endswith("/docs/runbooks.md")
        assert anchor == alert["alert"].lower()
        kind = re.search(rf"^### {alert['alert']}\n(Page|Ticket)\. ", RUNBOOKS, re.MULTILINE)
        assert kind, f"docs/runbooks.md has no section {alert['alert']}"
        assert kind[1].lower() == alert["labels"]["severity"]
    assert re.findall(r"^### (\w+)$", RUNBOOKS, re.MULTILINE) == names, "runbooks stand in the order of the alerts"


def test_every_alert_has_a_unit_test_in_which_it_is_silent_and_one_in_which_it_fires():
    tested = {}
    for test in unit_tests():
        checks = test["promql_expr_test"]
        assert all(test["name"] in check["expr"] for check in checks)
        tested[test["name"]] = {bool(check["exp_samples"]) for check in checks}
    assert tested == {alert["alert"]: {True, False} for alert in alerts()}


def test_promtool_reads_the_rules():
    done = subprocess.run(
        [program("promtool"), "check", "rules", *map(str, sorted(RULES.glob("*.yml")))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.rest
@pytest.mark.parametrize("path", rule_tests(), ids=lambda path: path.stem)
def test_the_alerts_fire_when_they_should(path):
    done = subprocess.run([program("promtool"), "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
