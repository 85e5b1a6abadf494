"""Markers from the folder, the shared services, and the path to `fakes`.

Services: `HEADGATE_TEST_DATABASE_URL` and `HEADGATE_TEST_REDIS_URL` if set; else PostgreSQL on its standard local
port if something answers there; Redis is always a server of the test run's own (a test may flush or kill it).
A skip for a missing service says why; with CI set it is an error.

No test's outcome hangs on how fast a disk is: `tmp_path` lies in memory where there is enough (a shared disk may stand
still for seconds, and refuse requests, as it should), and commits of PostgreSQL's test databases do not wait for one.
Nor on how busy the machine is: gateways wait longer for the limiter's Redis and for what is rebuilt than they would.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore2
import hypothesis
import pytest
import redis.utils

from kernels.cpu import instructions
from workers.process import waiting

instructions.limit_libraries()  # with HEADGATE_ENGINE_CPU (`make test-cpus`), before torch is imported
waiting.bound()  # as a worker does: a second thread of torch would be busy between all sums of the tests that want two

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

# Triton kernels run in Triton's interpreter, which is chosen when Triton is imported, once for a process. The variable
# goes again at once: processes that tests start are not to inherit it. On a GPU (`make test-gpu`) nothing is interpreted.
if os.environ.get("HEADGATE_TEST_GPU") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language

    del os.environ["TRITON_INTERPRET"]
    triton.knobs.runtime.interpret = True
    interpreted = importlib.import_module("interpreted")  # it needs the path and an interpreting Triton
    interpreted.make_cheaper()

# Every client would read all certificates of the system again, for servers on loopback that have none.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# Every connection to Redis would read the metadata of the installed package again.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

compiled_sql = importlib.import_module("compiled_sql")
compiled_sql.share()

# A shell's background job ignores Ctrl-C, and so would every server that a test starts and ends by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Temporary folders may lie in memory, and most tests with a journal do not fill a disk. Before a default becomes of it.
from workers.protocol import ballast  # noqa: E402

ballast.BALLAST_BYTES = 1 << 20

# A worker within the tests' own process would shorten their turns, and those of all that they start. Others are named.
from workers.process import turns  # noqa: E402

shorten = turns.shorten
turns.shorten = lambda pid=0: pid != 0 and shorten(pid)

IN_MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 4 << 30
if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > ENOUGH_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# Of every gateway that a test starts, in this process or beside it. Tests of the 0.1 s themselves say them.
os.environ.setdefault("HEADGATE_LIMITER_TIMEOUT_S", "4")


# How long an example takes says how busy the machine is. Hypothesis has a profile of its own where `CI` is set.
if not os.environ.get("CI"):
    hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("busy")

pytest_plugins = ("running",)

FOLDER_MARKERS = ("integration", "e2e", "chaos", "gpu")
REST_FOLDERS = ("e2e", "chaos", "clients", "integration/benchmarks")
"""These folders are what `make test` leaves to `make test-rest`, beside the tests that are marked `rest`."""
BOTH_DIALECTS = "integration/accounting"
"""Tests of SQL itself run on both dialects in `make test`. Elsewhere PostgreSQL is the rest's."""
WHOLE_SERVER_S = 240
"""Limit of a test that starts `headgate up`, once or twice, on a machine that does other things too."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak = os.environ.get("HEADGATE_SOAK") == "1"
    for item in items:
        folder = _folder(item.path).partition("/")[0]
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)
        if folder in ("e2e", "chaos") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_SERVER_S))
        if item.get_closest_marker("slow") and not soak:
            item.add_marker(pytest.mark.skip(reason="slow: runs under `make soak`"))
        if _is_of_the_rest(item) and not item.get_closest_marker("smoke"):
            item.add_marker("rest")


def pytest_collection_finish() -> None:
    """The collector looks no more at what 15,000 tests and the libraries are made of, which takes a second or two each time,
    and looks as seldom as in a gateway."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@functools.cache
def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parent.as_posix()


def _is_of_the_rest(item: pytest.Item) -> bool:
    folder = _folder(item.path)
    if folder.startswith(REST_FOLDERS):
        return True
    parameters = (
        item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    )
    return "postgresql" in [p for p in parameters if isinstance(p, str)] and not folder.startswith(BOTH_DIALECTS)


def wait_for_socket(path: Path, limit_s: float = 10.0) -> None:
    from load import stretched

    deadline = time.monotonic() + stretched(limit_s)
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(path))
                return
            except OSError:
                time.sleep(0.02)
    raise TimeoutError(f"nothing listens on {path}")


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real Redis/Valkey of this test run on a unix socket. `redis_db.emptied` gives a database of it."""
    from gateway.cli.embedded import find_server, server_command

    directory = tmp_path_factory.mktemp("redis")
    path = directory / "redis.sock"
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(
            server_command(find_server(), directory, path), stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        wait_for_socket(path)
        yield path
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def redis_url(redis_socket: Path) -> str:
    """An emptied database of the run's own server, or `HEADGATE_TEST_REDIS_URL` as it is."""
    external = os.environ.get("HEADGATE_TEST_REDIS_URL")
    if external:
        return external
    from redis_db import emptied

    return emptied(redis_socket, 0)


def postgres_base_url() -> str | None:
    """`postgresql+psycopg://…/database` of a server that answers, else None."""
    external = os.environ.get("HEADGATE_TEST_DATABASE_URL")
    if external and external.startswith("postgresql"):
        return external
    with socket.socket() as sock:
        sock.settimeout(1)
        if sock.connect_ex(("127.0.0.1", 5432)) != 0:
            return None
    return f"postgresql+psycopg://{os.environ.get('PGUSER', 'postgres')}@127.0.0.1:5432/postgres"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each dialect, dropped afterwards."""
    with empty_database(request.param, tmp_path) as url:
        yield url


@contextlib.contextmanager
def empty_database(dialect: str, folder: Path) -> Iterator[str]:
    """Yields the URL of a database that is dropped afterwards; SQLite's lies in the folder."""
    if dialect == "sqlite":
        yield f"sqlite+aiosqlite:///{folder / 'headgate.db'}"
        return
    base = postgres_base_url()
    if base is None:
        reason = "no PostgreSQL answers on 127.0.0.1:5432 and HEADGATE_TEST_DATABASE_URL is not set"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    import psycopg

    name = f"hg_test_{uuid.uuid4().hex[:12]}"
    plain = base.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    try:
        yield base.rsplit("/", 1)[0] + f"/{name}"
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """A machine that stands still for two seconds refuses no test's request. Not by the test's own `monkeypatch`, which
    is to be undone before the servers that a test asks for first are stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.limiter.rebuild.WAIT_S", 20.0)
        yield


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}"


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Any]:
    """A Redis of the test's own, which may be killed, stopped, emptied, or fill its disk."""
    directory = tmp_path / "redis"
    directory.mkdir()
    server = importlib.import_module("own_redis").OwnRedis(directory)
    server.start()
    yield server
    server.kill()
