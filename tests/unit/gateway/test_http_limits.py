"""Counting connections."""

from __future__ import annotations

import ipaddress

from gateway.http.http_limits import Addresses, ConnectionLimits

LIMITS = ConnectionLimits(1, 1, 1, 5, 2, (ipaddress.ip_network("10.0.0.0/8"),), 1)


def test_an_address_holds_so_many_and_a_trusted_one_as_many_as_there_are() -> None:
    addresses = Addresses(LIMITS)
    assert [addresses.admit("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert [addresses.admit("10.1.1.1") for _ in range(4)] == [True, True, True, False]
    addresses.leave("192.0.2.1")
    assert addresses.admit("192.0.2.1")
    assert not addresses.admit("198.51.100.1"), "five are open in all"


def test_addresses_without_connections_are_forgotten() -> None:
    addresses = Addresses(LIMITS)
    for i in range(1000):
        assert addresses.admit(f"192.0.2.{i}")
        addresses.leave(f"192.0.2.{i}")
    assert addresses.total == 0
    assert not addresses._open
