"""The checks of `headgate up` before it starts anything, and its messages about what it waits for."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions

from gateway.base.checks import CLOCK_APART_S, clocks_apart, redis_fault
from gateway.base.home import Home, HomeError
from gateway.base.settings import SettingsError
from gateway.cli.addresses import listen
from gateway.limiter.redis_keys import START_PROBE_KEY
from workers.process import file_systems
from workers.process.tls.certificates import Certificate, CertificateError, Files, host_name, https_context, moment
from workers.protocol.ballast import BALLAST_BYTES, NAME

LIMIT_S = 600.0
"""The time that workers, and then gateways, have to get ready."""
FIRST_WORD_S = 1.0
NEXT_WORD_S = 5.0
POLL_S = 0.1
ANSWER_S = 1.5
"""Redis answers a command within this time, or counts as not answering."""
STARTING_S = 10.0
"""The time that an embedded Redis has to load its data."""
MIB = 1024 * 1024
SPARE_BYTES = 16 * MIB
"""The space needed by Redis, SQLite and logs."""


@asynccontextmanager
async def told(what: Callable[[], str]) -> AsyncIterator[None]:
    """Prints what is waited for after one second, and then every five seconds."""
    began = time.monotonic()

    async def tell() -> None:
        pause_s = FIRST_WORD_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = NEXT_WORD_S
            print(f"Waiting for {what()} ({time.monotonic() - began:.0f} s).", file=sys.stderr, flush=True)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def certified_host(files: Files, host: str) -> str:
    """Reads the certificate of the base URL, as gateways will, and returns the host by which clients reach it. Raises
    `SettingsError`.
    """
    try:
        certificate = Certificate(files, https_context)
        if certificate.has_ended:
            print(f"{files.cert} has ended: clients refuse it.", file=sys.stderr, flush=True)
        elif not certificate.has_begun:
            begins = moment(certificate.begins_at)
            print(f"{files.cert} is not valid before {begins}: clients refuse it.", file=sys.stderr, flush=True)
        return host_name(files, host)
    except CertificateError as error:
        raise SettingsError(str(error)) from None


def check_file_system(home: Path, journals: Iterable[Path]) -> None:
    """Refuses a network file system under the home or a journal. Raises `HomeError`."""
    if said := file_systems.on_a_network([home, *journals]):
        raise HomeError(f"{said}. {file_systems.REMEDY}")


def refuse_taken_address(home: Home, host: str, port: int) -> None:
    """Keeps a start on an address that is taken from making a new home first. A home that is there may have an `up` of
    its own on the address, which its lock names. Raises `HomeError`."""
    if not home.is_there:
        listen(host, port).close()


def refuse_new_secrets(home: Home, database_url: str) -> None:
    """Keeps a home without key files from drawing new ones for a database whose keys and texts were made with others.
    Raises `HomeError`, and `AccountingError` for a database that cannot be asked.
    """
    missing = home.missing_secrets
    if not missing or (database_url == home.database_url and not home.database.exists()):
        return
    from accounting.database import migrate  # it loads SQLAlchemy, and most starts do not ask

    if migrate.is_used(database_url):
        names = " and ".join(str(path) for path in missing)
        raise HomeError(
            f"The database has API keys, and this home lacks the key files that belong to them ({names}): copy secrets/"
            " from another host or the backup."
        )


def check_room(home: Path, journals: Iterable[Path]) -> None:
    """Checks for the space of every journal's ballast: a process without ballast would refuse all requests. Raises
    `HomeError`.
    """
    needed: dict[int, int] = defaultdict(int)
    places: dict[int, Path] = {}
    for directory in (home, *journals):
        place = _existing(directory)
        device = place.stat().st_dev
        places.setdefault(device, place)
        needed[device] += SPARE_BYTES if directory == home else _missing_bytes(directory / NAME)
    for device, num_bytes in needed.items():
        disk = os.statvfs(places[device])
        free = disk.f_bavail * disk.f_frsize
        if free < num_bytes:
            raise HomeError(
                f"The disk of {places[device]} has {free // MIB} MiB free, and a start needs {num_bytes // MIB}:"
                f" each gateway and worker keeps {BALLAST_BYTES // MIB} for the day on which it is full."
                " Make room, or set HEADGATE_HOME to a directory on another disk."
            )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _missing_bytes(ballast: Path) -> int:
    return BALLAST_BYTES - (ballast.stat().st_blocks * 512 if ballast.exists() else 0)


async def check_redis(url: str, *, is_ours: bool) -> None:
    """Checks that Redis answers, accepts writes, and has our time. `is_ours` means that it has just been started.
    Raises `HomeError`, and `SettingsError` for a URL that cannot be read.
    """
    try:
        client = redis.asyncio.Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
    except ValueError as error:
        raise SettingsError(f"HEADGATE_REDIS_URL cannot be read: {str(error).rstrip('.')}.") from None
    try:
        ahead_s = await _ahead_s(client, time.monotonic() + (STARTING_S if is_ours else 0.0))
    except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
        where = "see the log redis.log of this home" if is_ours else "check HEADGATE_REDIS_URL"
        raise HomeError(f"{redis_fault(error)} It is at {_masked(url)}: {where}.") from None
    finally:
        await client.aclose()
    if abs(ahead_s) > CLOCK_APART_S:
        raise HomeError(clocks_apart(ahead_s))


async def eviction_policy(url: str) -> str | None:
    """Returns the `maxmemory-policy` of a Redis that answers, or None if it does not say it."""
    async with redis.asyncio.Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S) as client:
        try:
            told = await client.info("memory")
        except (redis.exceptions.RedisError, OSError, TimeoutError):
            return None
    policy = told.get("maxmemory_policy")
    return None if policy is None else str(policy)


async def _ahead_s(client: redis.asyncio.Redis, until: float) -> float:
    """Returns how far Redis' clock is ahead of ours, in seconds, once it answers and accepts a write."""
    while True:
        try:
            await client.set(START_PROBE_KEY, 1, ex=10)
            seconds, microseconds = await client.time()
            return float(seconds + microseconds / 1e6 - time.time())
        except redis.exceptions.BusyLoadingError:
            pass  # it is there, however long it takes
        except (redis.exceptions.RedisError, OSError, TimeoutError):
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(POLL_S)


def _masked(url: str) -> str:
    """Returns the URL without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
