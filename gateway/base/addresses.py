"""The client address of a request: the peer's address, or the one that trusted proxies report. The
functions are pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
THIS_MACHINE = "127.0.0.1"
TRUSTED = "HEADGATE_TRUSTED_NETWORKS"
CERTIFICATE = "HEADGATE_TLS_CERT"
LIST_A_PROXY = f"Set {CERTIFICATE} and HEADGATE_TLS_KEY, put a proxy with TLS in front and name it in {TRUSTED}, or listen on 127.0.0.1."


def networks(values: Iterable[str]) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(value) for value in values)


def within(address: str, inside: Iterable[Network]) -> bool:
    """Returns False for text that is no IP address. An IPv4-mapped IPv6 address counts as the IPv4 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in inside)


def client_address(peer: str, forwarded_for: Sequence[str], trusted: Sequence[Network]) -> str:
    """Returns the last hop that is no trusted proxy. Each proxy appends the address that asked it; the client itself
    may have written what stands further left. An empty `peer` stands for a unix socket, whose other end is on this
    machine.
    """
    hops = [hop.strip() for value in forwarded_for for hop in value.split(",")]
    address = peer or THIS_MACHINE
    while hops and within(address, trusted):
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


def keys_in_the_clear(host: str, *, is_safe: bool) -> str:
    """Returns a sentence if other machines reach an address of a gateway, unless `is_safe`: it has TLS, or a proxy that may
    have it is listed. `host` is an IP address; an empty one stands for a unix socket.
    """
    if not host or is_safe or within(host, LOOPBACK):
        return ""
    return f"{host} may be reached from other machines without TLS, and no proxy is listed: API keys would travel in the clear"


class UnlistedProxy:
    """Finds the operator's own proxy that is not listed as trusted, and reports it once. Only a near peer counts: a
    stranger can send the header too.
    """

    def __init__(self, trusted: Sequence[Network]) -> None:
        self._trusted = trusted
        self._is_told = False

    def hint(self, peer: str, forwarded_for: Sequence[str]) -> str | None:
        """Returns one sentence for the log, or None."""
        near = peer or THIS_MACHINE
        if not forwarded_for or self._is_told or within(near, self._trusted) or not _is_near(near):
            return None
        self._is_told = True
        return (
            f"A proxy at {near} sends X-Forwarded-For and is not listed in HEADGATE_TRUSTED_NETWORKS: its word is ignored, "
            "and all its clients count as one address; list it if it is yours and sets this header itself."
        )


def _is_near(address: str) -> bool:
    """The address belongs to this machine or to a private network."""
    return _is_address(address) and ipaddress.ip_address(address).is_private
