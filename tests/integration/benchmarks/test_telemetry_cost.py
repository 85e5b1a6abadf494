"""What the benchmark of telemetry's cost says of its readings."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def telemetry(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import telemetry

    return telemetry


def test_sides_that_cost_the_same_differ_by_nothing_whatever_a_round_takes(telemetry):
    same = [900.0, 1100.0, 1000.0]
    found = telemetry.summary({"with": same, "without": same, "own": [9.0, 11.0, 10.0], "others": [0.0] * 3})
    assert (found["ratio"], found["bounds"], found["own"], found["is_met"]) == (1.0, [1.0, 1.0], 1.0101, False)
    found = telemetry.summary({"with": same, "without": same, "own": [9.0, 11.0, 10.0], "others": same})
    assert (found["own"], found["own_of_all"], found["is_met"]) == (1.0101, 1.005, True)


def test_the_ratio_is_of_sums_and_its_bounds_show_how_rounds_differ(telemetry):
    steady = telemetry.summary({"with": [1020.0] * 6, "without": [1000.0] * 6, "own": [0.0] * 6, "others": [0.0] * 6})
    assert (steady["ratio"], steady["bounds"], steady["is_met"]) == (1.02, [1.02, 1.02], False)
    uneven = telemetry.summary(
        {"with": [1120.0, 920.0] * 3, "without": [1000.0] * 6, "own": [0.0] * 6, "others": [0.0] * 6}
    )
    low, high = uneven["bounds"]
    assert uneven["ratio"] == 1.02
    assert 0.92 <= low < 1.0 < 1.04 < high <= 1.12


def test_what_the_clock_itself_takes_is_left_out(telemetry, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(telemetry.time, "thread_time", lambda: float(next(ticks)))  # each reading takes a second
    own = telemetry.OwnTime()
    nothing, something = own.counted(lambda: None), own.counted(lambda: [next(ticks) for _ in range(5)])
    for _ in range(10):
        nothing()
    assert own.seconds == 0.0
    something()
    assert own.seconds == 5.0


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_a_gateway_is_measured_with_telemetry_and_without(tmp_path):
    output = tmp_path / "out.json"
    small = ["--load", "body:2", "--seconds", "1", "--turn-s", "0.3"]
    subprocess.run([sys.executable, ROOT / "benchmarks" / "telemetry.py", *small, "--output", output], check=True)
    assert "us_per_request" in output.read_text()
