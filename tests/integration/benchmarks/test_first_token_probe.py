"""What the probe of first tokens says of its readings."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SAME = [[1.0 + 0.01 * (i * 7 % 40), 1.0 + 0.01 * (i * 11 % 40)] for i in range(40)]
SOONER = [[0.1 + 0.01 * i, 1.0 + 0.01 * i] for i in range(40)]


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import first_token_probe

    return first_token_probe


def test_times_of_one_kind_tell_nothing_and_a_cached_text_comes_sooner(probe):
    found = probe.verdict({"stranger": SAME, "owner": SOONER})
    low, high = found["stranger"]["bounds"]
    assert low < 0.5 < high
    assert found["owner"]["area"] == 1.0
    assert found["is_met"]


@pytest.mark.parametrize(("stranger", "owner"), [(SOONER, SOONER), ([[b, a] for a, b in SOONER], SOONER), (SAME, SAME)])
def test_a_guess_that_is_told_by_its_time_fails_and_so_does_a_control_that_sees_nothing(probe, stranger, owner):
    assert not probe.verdict({"stranger": stranger, "owner": owner})["is_met"]


def test_equal_times_count_half(probe):
    assert probe.area([[1.0, 1.0], [1.0, 1.0]]) == 0.5
