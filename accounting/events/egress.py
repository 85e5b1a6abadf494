"""The rules of egress: which addresses, ports and URLs this Headgate may connect to when a customer names them. The
module is pure.

A URL is checked when it is given, for a clear refusal. Its addresses are checked again at each connect, as the name may
resolve differently by then. Only the second check protects.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

import msgspec

from accounting.values.errors import InvalidError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_URL = 2048
UNICAST = ipaddress.ip_network("2000::/3")
# Python 3.11 takes these for public, but they are not: protocol assignments, relays of 6to4, documentation.
REFUSED = tuple(ipaddress.ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "2002::/16", "3fff::/20"))
PRIVATE_SUFFIXES = ("localhost", "local", "internal", "localdomain", "home.arpa", "onion")
WEB_PORTS = frozenset({80, 443})
STORE_PORTS = frozenset(
    {
        1433,
        1521,
        2049,
        2181,
        2375,
        2376,
        2379,
        2380,
        3306,
        4369,
        5432,
        5433,
        5672,
        5984,
        6379,
        6380,
        6432,
        6443,
        7000,
        7001,
        7474,
        7687,
        8086,
        8123,
        8500,
        9000,
        9042,
        9092,
        9200,
        9300,
        10250,
        10255,
        11211,
        15672,
        16379,
        25672,
        26257,
        26379,
        27017,
        27018,
        27019,
    }
)
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+")
_VISIBLE = re.compile(r"[!-~]+")
_A_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


class PlaceError(InvalidError):
    """The URL is none of the public internet over TLS. The operator may permit networks of its own."""


class Egress(msgspec.Struct, frozen=True):
    """The addresses that may be connected to. `allowed` has the operator's own networks, which are permitted besides
    the public internet."""

    allowed: tuple[Network, ...] = ()

    def permits(self, address: str, port: int, *, encrypted: bool = True) -> bool:
        """Says whether a connection is permitted. Unencrypted ones are permitted only into the operator's own
        networks."""
        found = _plain(ipaddress.ip_address(address))
        if not 0 < port < 65536 or port in STORE_PORTS or (port < 1024 and port not in WEB_PORTS):
            return False
        if any(found in network for network in self.allowed):
            return True
        return encrypted and _is_public(found)

    def check(self, url: str) -> None:
        """Raises InvalidError, which names the rule and nothing that was looked up."""
        if len(url) > MAX_URL or not _VISIBLE.fullmatch(url) or "\\" in url:
            raise _refused("must be a URL of at most 2048 visible ASCII characters")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise _refused("is not a URL") from None
        if parts.scheme != "https" and not (parts.scheme == "http" and self.allowed):
            raise _refused("must begin with https://", PlaceError)
        if "@" in parts.netloc or "#" in url:
            raise _refused("must hold neither a user nor a fragment")
        self._check_place(
            host, (443 if parts.scheme == "https" else 80) if port is None else port, parts.scheme == "https"
        )

    def _check_place(self, host: str, port: int, encrypted: bool) -> None:
        try:
            address = str(ipaddress.ip_address(host))
        except ValueError:
            self._check_name(host)
            address = "1.1.1.1"  # stands for any public address: the real one is checked at each connect
            encrypted = True
        if not self.permits(address, port, encrypted=encrypted):
            raise _refused("names an address or a port that is not spoken to", PlaceError)

    def _check_name(self, host: str) -> None:
        name = host.removesuffix(".")
        last = name.rpartition(".")[2]
        is_private = any(name == s or name.endswith("." + s) for s in PRIVATE_SUFFIXES)
        if not _HOST.fullmatch(name) or _A_NUMBER.fullmatch(last) or is_private:
            raise _refused("must name a public host", PlaceError)


def networks(text: str) -> tuple[Network, ...]:
    """Parses a comma-separated list of networks. Raises ValueError."""
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def _plain(address: Address) -> Address:
    """Returns the IPv4 address of an IPv4-mapped IPv6 address, so that it is judged as IPv4."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def _is_public(address: Address) -> bool:
    if not address.is_global or address.is_multicast or any(address in one for one in REFUSED):
        return False
    # All other IPv6 addresses are local, or carry an IPv4 address to somebody who unpacks it (NAT64, compatible).
    return address.version == 4 or address in UNICAST


def _refused(rule: str, kind: type[InvalidError] = InvalidError) -> InvalidError:
    return kind(f"The webhook's URL {rule}.", "url")
