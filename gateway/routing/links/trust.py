"""Trust in a worker's address: it is of this machine, both ends of the link show a certificate, or the operator has said so."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from workers.process.tls.certificates import Certificate
from workers.protocol import addresses


class LinkDown(Exception):
    """The worker cannot be reached."""


class LinkRefused(LinkDown):
    """The worker is there, and one side does not trust the other, or does not speak as it does. The message says why."""


@dataclass(frozen=True, slots=True)
class Trust:
    certificate: Certificate | None = None
    """This gateway's certificate for links. With it, every link to a `tcp:` address speaks TLS."""
    may_be_plain: bool = False
    """Whether links beyond this machine may go without TLS."""

    def context(self, address: str) -> ssl.SSLContext | None:
        """Returns how an address is dialled by TLS, or None for a link without TLS. Raises `LinkRefused` for an address that
        must not be dialled.
        """
        if addresses.host_port(address) is None:
            return None
        if self.certificate is not None:
            return self.certificate.newest
        if addresses.is_open(address) and not self.may_be_plain:
            raise LinkRefused(addresses.NEEDS_TLS)
        return None
