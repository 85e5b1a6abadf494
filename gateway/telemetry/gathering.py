"""Gathers one page of metrics over all gateway processes of this home, for the operator's listener."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from gateway.telemetry.exposition import gathered
from workers.process.metrics_text import OPENMETRICS, Page

PEER_S = 0.25


async def gather(sockets: Sequence[Path], accept: str) -> Page:
    """Asks each process on its own socket, `gateway-<slot>.sock`; one that does not answer is shown as down."""
    pages = await asyncio.gather(*(_page(path) for path in sockets))
    slots = [path.stem.removeprefix("gateway-") for path in sockets]
    # Reading a page of a thousand lines takes 40 ms, for which streams would stand still.
    return await asyncio.to_thread(gathered, list(zip(slots, pages, strict=True)), accept)


async def _page(path: Path) -> str | None:
    """Returns the page of a process, or None if it does not answer."""
    timeout = aiohttp.ClientTimeout(total=PEER_S)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session,
            session.get("http://gateway/metrics", headers={"accept": OPENMETRICS}) as answer,
        ):
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
