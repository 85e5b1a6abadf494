"""Which addresses of workers other machines reach."""

from __future__ import annotations

import pytest

from workers.protocol.addresses import host_port, is_open


@pytest.mark.parametrize(
    "address", ["unix:/run/w.sock", "tcp:127.0.0.1:7000", "tcp:127.9.9.9:1", "tcp:[::1]:7000", "tcp:localhost:7000"]
)
def test_only_this_machine_reaches_them(address: str) -> None:
    assert not is_open(address)


@pytest.mark.parametrize(
    "address", ["tcp:0.0.0.0:7000", "tcp:[::]:7000", "tcp:10.0.0.5:7000", "tcp:gpu1:7000", "tcp:localhost.evil:7000"]
)
def test_other_machines_reach_them(address: str) -> None:
    assert is_open(address)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert host_port("tcp:[fd00::5]:7000") == ("fd00::5", 7000)
