"""What the benchmark of the gateway says of its readings, and that it runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gateway_load

    return gateway_load


def figures(per_s: float, cpu_ms: float) -> dict[str, float]:
    return {"per_s": per_s, "per_core": 1000 / cpu_ms, "own_cpu_ms": cpu_ms}


def test_rounds_become_their_medians_number_by_number(load):
    rounds = [{"at_1": {"per_s": 3.0, "per_core": None}}, {"at_1": {"per_s": 1.0, "per_core": 5.0}}]
    assert load.medians([*rounds, {"at_1": {"per_s": 2.0, "per_core": 7.0}}]) == {
        "at_1": {"per_s": 2.0, "per_core": 6.0}
    }


def test_a_bar_is_met_from_its_own_side_and_what_was_not_measured_has_none(load):
    own = {"at_64": figures(700, 0.4), "events": figures(50_000, 0.02)}
    bare = {"at_64": figures(1000, 0.1), "events": figures(200_000, 0.005)}
    keys = {"first": figures(10, 4.0), "keys_1": figures(10, 0.4), "keys_10": figures(10, 0.43)}
    found = load.verdicts({"median": {"headgate": own, "bare": bare}, "keys": keys})
    assert {name: one["is_met"] for name, one in found.items()} == {
        "cpu_ms_at_64": True,
        "requests_per_core": True,
        "events_per_core": False,
        "requests_to_bare_at_64": True,
        "events_to_bare": False,
        "keys_to_one": True,
        "first_request_ms": False,
    }
    assert found["requests_to_bare_at_64"]["found"] == 0.7


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_headgate_and_the_bare_proxy_answer_everything_that_is_sent(tmp_path):
    output = tmp_path / "out.json"
    small = ["--rounds", "1", "--seconds", "1", "--in-flight", "1", "4", "--latencies", "2", "--litellm", ""]
    command = [sys.executable, ROOT / "benchmarks" / "gateway_load.py", *small]
    subprocess.run([*command, "--keys", "1", "3", "--requests", "50", "--output", output], check=True, cwd=ROOT)
    found = json.loads(output.read_text())["sqlite"]
    assert found["median"].keys() == {"headgate", "bare"}
    assert all(one["at_4"]["per_s"] > 0 and one["events"]["per_s"] > 0 for one in found["median"].values())
    assert found["keys"].keys() == {"first", "keys_1", "keys_3"}
    assert {"gateway", "worker", "redis"} <= found["memory"].keys()
    assert {"cpu_ms_at_1", "events_to_bare", "keys_to_one", "bytes_per_request"} <= found["bars"].keys()
