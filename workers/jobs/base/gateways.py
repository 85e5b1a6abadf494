"""Sessions with the gateways: how they are reached and trusted, as HEADGATE_URL and HEADGATE_URL_CA say."""

from __future__ import annotations

import ssl

import aiohttp

from workers.jobs.base.settings import JobsSettings
from workers.process.setting_forms import UNIX_URL


def base_url(settings: JobsSettings) -> str:
    """Returns the text that paths of requests are appended to."""
    return "http://localhost" if settings.url.startswith(UNIX_URL) else settings.url


def session(settings: JobsSettings, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    """Opens a session. Raises OSError if the authorities cannot be read."""
    return aiohttp.ClientSession(connector=_connector(settings), timeout=timeout)


def _connector(settings: JobsSettings) -> aiohttp.BaseConnector:
    if settings.url.startswith(UNIX_URL):
        return aiohttp.UnixConnector(settings.url.removeprefix("unix://"))
    ca = settings.url_ca
    return aiohttp.TCPConnector(ssl=True if ca is None else ssl.create_default_context(cafile=ca))
