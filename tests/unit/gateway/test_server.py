"""What a gateway process asks of its machine."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from gateway.server import allow_files


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Few open files, as most systems give a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield 1024, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_b1_a_gateway_may_open_as_many_files_as_it_takes_connections(limits: tuple[int, int]) -> None:
    _, hard = limits
    allow_files(4000)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(4000, hard), hard)
    allow_files(2000)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(4000, hard), hard), "never lowered"


def test_b1_the_operators_own_limit_stays(limits: tuple[int, int]) -> None:
    _, hard = limits
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine has no such limit")
    allow_files(hard + 1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
