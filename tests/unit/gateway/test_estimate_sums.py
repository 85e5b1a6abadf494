"""A sample of lines is even, and each line is visited once."""

from __future__ import annotations

import itertools

import pytest

from gateway.estimates.sums import spread


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
