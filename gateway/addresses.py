"""Whose address a request comes from: the peer's, or behind listed proxies the one that they report. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(values: Iterable[str]) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(value) for value in values)


def within(address: str, inside: Iterable[Network]) -> bool:
    """False for what is no IP address. An IPv4 address in IPv6 clothes is the IPv4 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in inside)


def client_address(peer: str, forwarded_for: Sequence[str], trusted: Sequence[Network]) -> str:
    """The last hop that is no listed proxy: each proxy appends whom it was asked by, and what stands further left is
    the client's own word. `peer` "": a unix socket, whose other end is one of ours."""
    hops = [hop.strip() for value in forwarded_for for hop in value.split(",")]
    address = peer
    while hops and (not address or within(address, trusted)):
        hop = hops.pop()
        if not _is_address(hop):
            return address
        address = hop
    return address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
