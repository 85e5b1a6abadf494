"""Which hop is the client."""

from __future__ import annotations

import ipaddress

import pytest

from gateway.base.addresses import client_address, keys_in_the_clear, within

TRUSTED = (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("127.0.0.0/8"))


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("", [], "127.0.0.1"),
        ("192.0.2.1", ["198.51.100.1"], "192.0.2.1"),
        ("10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["6.6.6.6, 198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["6.6.6.6, 198.51.100.1, 10.0.0.2"], "198.51.100.1"),
        ("10.0.0.1", ["6.6.6.6", "198.51.100.1 ,10.0.0.2"], "198.51.100.1"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["unknown"], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6, unknown"], "10.0.0.1"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("10.0.0.1", ["2001:db8::1"], "2001:db8::1"),
    ],
)
def test_the_client_is_the_last_hop_that_is_no_listed_proxy(peer, forwarded_for, client):
    assert client_address(peer, forwarded_for, TRUSTED) == client


def test_an_ipv4_address_in_ipv6_clothes_is_the_ipv4_address():
    assert within("::ffff:10.1.2.3", TRUSTED)
    assert not within("::ffff:192.0.2.1", TRUSTED)
    assert not within("nonsense", TRUSTED)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1"])
def test_an_address_that_others_reach_without_a_proxy_carries_keys_in_the_clear(host: str) -> None:
    assert "in the clear" in keys_in_the_clear(host, is_safe=False)
    assert not keys_in_the_clear(host, is_safe=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", ""])
def test_loopback_and_unix_sockets_carry_none(host: str) -> None:
    assert not keys_in_the_clear(host, is_safe=False)
