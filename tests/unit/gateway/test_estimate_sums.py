"""A sample of lines is even, each line is visited once, and other tenants come first by their share."""

from __future__ import annotations

import itertools

import pytest

from gateway.estimates.sums import spread, turns_of_others


@pytest.mark.parametrize("num_lines", [0, 1, 2, 3, 10, 997, 50_000])
def test_each_index_comes_once(num_lines: int) -> None:
    assert sorted(spread(num_lines)) == list(range(num_lines))


@pytest.mark.parametrize("num_lines", [1_000, 1_024, 50_000])
@pytest.mark.parametrize("num_visited", [20, 55, 200])
def test_every_beginning_is_an_even_sample(num_lines: int, num_visited: int) -> None:
    visited = sorted(itertools.islice(spread(num_lines), num_visited))
    edges = [-1, *visited, num_lines]
    gaps = [right - left for left, right in itertools.pairwise(edges)]
    assert max(gaps) <= 4.5 * num_lines / num_visited


def test_of_each_other_tenant_no_more_than_its_share_comes_first() -> None:
    weights = {"own": 2.0, "same": 2.0, "small": 0.5, "heavy": 10.0}

    def before(own_tokens: int, **backlogs: int) -> int:
        return turns_of_others("own", own_tokens, backlogs, weights)

    assert before(1000) == before(1000, own=10**9) == 0
    assert before(1000, same=300) == 300
    assert before(1000, same=10**9) == 1000
    assert before(1000, small=10**9) == 250
    assert before(1000, heavy=10**9, same=1, own=5) == 5001
    assert before(0, same=10**9) == 0
