"""A gateway process from its start to its exit: sockets, probes, drain.

The drain (operations.md section 10): unready at once → the listener stays open for a grace time → nothing new → streams
finish → the rest end with `server_draining` → everything is settled → exit. A second signal quits.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Sequence

from aiohttp import web

from gateway.app import create_app
from gateway.base.addresses import LIST_A_PROXY, keys_in_the_clear
from gateway.base.app_keys import DETACHED, LIFECYCLE
from gateway.base.lifecycle import Lifecycle
from gateway.base.settings import GatewaySettings, SettingsError
from gateway.generation.served.models import MODELS
from gateway.http.http_limits import ConnectionLimits, GatewayRunner
from gateway.listening import tls
from gateway.listening.sockets import BACKLOG, ListenerMetrics, base_socket, inherited, ops_socket
from gateway.resources import serve_models
from gateway.routes.ops import create_ops_app, create_scraped_app
from gateway.telemetry.metrics import METRICS
from workers.process import file_systems, turns
from workers.process.children.forked import give_back
from workers.process.heartbeat import Heartbeat
from workers.protocol.segments import SlotTaken

logger = logging.getLogger(__name__)

OTHER_FILES = 1000
"""The number of files that a gateway opens in addition to its clients' connections: SQL, Redis, workers, journals,
logs.
"""
SETTLE_S = 10.0
"""The time after the last stream for settlements, journal and spans."""
ASKS_AGAIN_S = 0.5
"""The time within which a client in a loop sends its next request on the same connection."""
GC_THRESHOLDS = (50_000, 2, 100)
"""Thresholds of the garbage collector. Requests have no reference cycles, so it finds next to nothing, and what it takes
grows with the objects that requests hold at the moment. With 64 requests in flight these are fewer than the first
threshold, so it hardly runs; at 700 it took 7 % of the gateway's CPU. A collection of 10,000 objects stops the loop for
1 to 8 ms. All objects that requests hold are examined seldom, because that stops every stream for 0.1 s.
"""


async def serve(settings: GatewaySettings) -> None:
    """Runs until a signal. Raises `SettingsError` when it cannot start, `CannotStartYet` when it may later."""
    local = [settings.journal_dir, *([] if settings.database_url else [settings.home])]
    if said := file_systems.on_a_network(local):
        raise SettingsError(f"{said}. {file_systems.REMEDY}")
    loop = asyncio.get_running_loop()
    allow_files(settings.max_connections + OTHER_FILES)
    app = create_app(settings)
    runner = GatewayRunner(app, ConnectionLimits.of(settings), shutdown_timeout=SETTLE_S)
    stop = asyncio.Event()
    heartbeat = Heartbeat(settings.heartbeat_fd)
    lifecycle = app[LIFECYCLE]
    ops = web.AppRunner(create_ops_app(app, lifecycle.draining.set), access_log=None)
    scraped = web.AppRunner(create_scraped_app(app), access_log=None)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    try:
        try:
            await runner.setup()
        except SlotTaken as error:
            raise SettingsError(f"Slot {settings.slot} is in use: {error}.") from None
        await ops.setup()
        await scraped.setup()
        collect_seldom()
        await web.UnixSite(ops, str(_own_socket_path(settings))).start()
        ops_site = web.SockSite(scraped, ops_socket(settings), backlog=BACKLOG)
        await ops_site.start()
        opened = base_socket(settings)
        host = opened.getsockname()[0] if opened.family != socket.AF_UNIX else ""
        certificates = app[tls.CERTIFICATES]
        has_tls = certificates.listener is not None
        if said := keys_in_the_clear(host, is_safe=has_tls or bool(settings.trusted_networks)):
            logger.warning("%s. %s", said, LIST_A_PROXY, extra={"event": "keys_in_the_clear"})
        app[METRICS].registry.register(ListenerMetrics(opened))
        sites = tls.sites(runner, opened, certificates)
        if settings.local_fd is not None:
            sites.append(web.SockSite(runner, inherited(settings.local_fd, "HEADGATE_LOCAL_FD"), backlog=BACKLOG))
        for site in sites:
            await site.start()
        logger.info(
            "gateway_ready",
            extra={
                "slot": settings.slot,
                "url": sites[0].name,
                "ops_url": ops_site.name,
                "num_frozen": gc.get_freeze_count(),
                "turn_ns": turns.turn_ns(),
            },
        )
        give_back()
        heartbeat.begin()
        asked = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, asked.set)
        reloading = asyncio.create_task(_reload_when_asked(app, asked))
        draining = asyncio.create_task(_drain_when_asked(app, settings, runner, sites))
        await stop.wait()
        lifecycle.draining.set()
        await draining
        reloading.cancel()
    finally:
        await runner.cleanup()
        await scraped.cleanup()
        await ops.cleanup()
        heartbeat.end()
    logger.info("gateway_stopped", extra={"slot": settings.slot})


def collect_seldom() -> None:
    """Leaves the objects of this moment out of all collections, and makes these seldom: one over all modules' objects
    would stop every stream for 0.1 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _reload_when_asked(app: web.Application, asked: asyncio.Event) -> None:
    """Serves the models that the settings name now, after each SIGHUP. What cannot be read is logged, and nothing
    changes.
    """
    while True:
        await asked.wait()
        asked.clear()
        try:
            await serve_models(app)
        except SettingsError as error:
            logger.error("models_not_read", extra={"why": str(error)})
        except Exception:  # a fault of one reading must not make this gateway deaf to the next signal
            logger.exception("models_not_read")
        else:
            logger.info("models_read", extra={"models": list(app[MODELS].ids)})


def allow_files(number: int) -> None:
    """Raises the process's own limit of open files to `number`, or as far as the operator's limit allows. The usual
    limit is 1024, which is no more than the connections of two load tools; beyond it no client is served.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(1)  # the second signal exits at once
    stop.set()


async def _drain_when_asked(
    app: web.Application, settings: GatewaySettings, runner: GatewayRunner, sites: Sequence[web.BaseSite]
) -> None:
    """Drains after a signal or `POST /drain`; returns when nothing runs any more."""
    lifecycle = app[LIFECYCLE]
    await lifecycle.draining.wait()
    logger.info("gateway_draining", extra={"slot": settings.slot})
    await asyncio.sleep(settings.drain_grace_s)
    for site in sites:
        await site.stop()
    lifecycle.is_leaving = True
    # What comes later than that would hardly end in time: its client is told to ask another gateway.
    closing = asyncio.get_running_loop().call_later(settings.drain_s / 2, setattr, lifecycle, "accepting", False)
    has_ended = await _is_quiet(lifecycle, runner, settings.drain_s)
    closing.cancel()
    lifecycle.accepting = False
    if not has_ended:
        lifecycle.cut()
        await lifecycle.idle(SETTLE_S)
    await app[DETACHED].join(SETTLE_S)


async def _is_quiet(lifecycle: Lifecycle, runner: GatewayRunner, limit_s: float) -> bool:
    """Waits until nothing runs, and no client has asked again on a connection that it has open. An answer whose head
    left before the drain does not close its connection, so its client may send one more request, whose answer does.
    """
    until = time.monotonic() + limit_s
    while await lifecycle.idle(max(0.0, until - time.monotonic())):
        num_begun = lifecycle.num_begun
        if runner.server is None or not runner.server.connections:
            return True
        await asyncio.sleep(ASKS_AGAIN_S)
        if lifecycle.num_begun == num_begun:
            return True
    return False


def _own_socket_path(settings: GatewaySettings) -> str:
    settings.ops_socket.unlink(missing_ok=True)
    return str(settings.ops_socket)
