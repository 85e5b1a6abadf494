"""The place where commands find a gateway: its URL, and how a connection to it is made and trusted."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass

import aiohttp

from workers.process.setting_forms import UNIX_URL

CA = "HEADGATE_URL_CA"


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    """The base URL as people know it."""
    socket: str = ""
    """The unix socket on which the base URL is called; empty: it is called by the URL."""

    @property
    def base(self) -> str:
        """The text that paths of requests are appended to."""
        return "http://localhost" if self.socket else self.url

    def connector(self) -> aiohttp.BaseConnector:
        """Raises OSError if the authorities of HEADGATE_URL_CA cannot be read."""
        if self.socket:
            return aiohttp.UnixConnector(self.socket)
        ca = os.environ.get(CA)
        return aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=ca) if ca else True)


def given(url: str) -> Server | None:
    """Returns the place that HEADGATE_URL names, or None for what is no base URL."""
    if url.startswith(UNIX_URL):
        return Server(url, url.removeprefix("unix://"))
    if not re.match(r"https?://[^/\s]", url) or not url.isprintable():
        return None
    return Server(url.rstrip("/").removesuffix("/v1"))
