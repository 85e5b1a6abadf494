"""What a gateway process asks of its machine."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.routes.ops import is_local
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


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_peer_on_this_machine_is_local_however_its_address_is_written(peer: str) -> None:
    transport = Mock(get_extra_info=lambda name, default=None: (peer, 1) if name == "peername" else None)
    for host, expected in (("localhost", True), ("[::ffff:127.0.0.1]:80", True), ("example.com", False)):
        request = make_mocked_request("GET", "/", headers={"host": host}, transport=transport)
        assert is_local(request) is expected
