"""The addresses of workers, `unix:/path` and `tcp:host:port`, and which of them need TLS. The module is pure."""

from __future__ import annotations

import ipaddress

NEEDS_TLS = (
    "a link beyond this machine needs TLS. Set HEADGATE_LINK_CA, HEADGATE_LINK_CERT and HEADGATE_LINK_KEY here and on the"
    " other side (`headgate certificates` makes the files), or, in a network that only gateways and workers reach,"
    " HEADGATE_LINK_PLAIN=1 on both"
)


def host_port(address: str) -> tuple[str, int] | None:
    """Returns host and port of a `tcp:` address, or None for a unix socket."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return None
    host, _, port = rest.rpartition(":")
    return host.strip("[]"), int(port)


def is_open(address: str) -> bool:
    """Returns whether other machines may reach an address."""
    where = host_port(address)
    if where is None:
        return False
    host = where[0].partition("%")[0]
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
