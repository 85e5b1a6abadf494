"""A real gateway in the test's own loop: real sockets, real Redis, real SQL, keys and prices in place."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
from aiohttp import web
from byte_model import TEMPLATE, write_byte_model
from load import stretched
from migrated import migrated, migrated_database
from sqlalchemy import text

from accounting.access import api_keys
from accounting.books import books
from accounting.lifecycle.bootstrap import EXAMPLE_RATES, bootstrap
from accounting.tenants import tenants
from accounting.values.tenant_types import Credentials
from gateway import app as gateway_app
from gateway.app import create_app
from gateway.base.app_keys import DATABASE, DETACHED
from gateway.base.settings import GatewaySettings
from gateway.generation.stream import GENERATION
from gateway.http.http_limits import ConnectionLimits, GatewayRunner
from gateway.http.route_table import ROUTES, Route
from gateway.listening import tls
from gateway.metering.metering import METERING

MODEL = "scripted"
PEPPER = b"p" * 32
UNWITNESSED = (
    "SELECT count(*) FROM ledger_entry e WHERE e.kind = 'settle' AND NOT EXISTS "
    "(SELECT 1 FROM engine_record r WHERE r.request_id = e.request_id)"
)


add_routes = gateway_app.add_routes


def add_shared_routes(app: web.Application, table: Sequence[Route]) -> None:
    """Adds the routes that were made for the first gateway of a test process. To make 300 takes a tenth of the time in
    which a gateway starts, and they know nothing of their application."""
    made = _application_of(tuple(table))
    for resource in made.router.resources():
        app.router.register_resource(resource)
    app[ROUTES] = dict(made[ROUTES])


@functools.cache
def _application_of(table: tuple[Route, ...]) -> web.Application:
    made = web.Application()
    add_routes(made, table)
    return made


gateway_app.add_routes = add_shared_routes


@dataclass
class RunningGateway:
    app: web.Application
    settings: GatewaySettings
    url: str
    keys: Credentials
    first_seq: int
    """The journal's last record at the start."""
    runner: GatewayRunner

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, api_key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 20} | options
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key or self.keys.api_key, **options)

    def operator(self) -> openai.AsyncOpenAI:
        """The official client with the operator's key, for `client.admin`."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="", admin_api_key=self.keys.admin_key, max_retries=0
        )

    def session(self, api_key: str | None = None) -> aiohttp.ClientSession:
        """A plain client; `api_key` "" for none. A request that is never answered fails before the test's own limit."""
        key = self.keys.api_key if api_key is None else api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return aiohttp.ClientSession(self.url, headers=headers, timeout=aiohttp.ClientTimeout(total=100))

    async def socket(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def workers(self, count: int, limit_s: float = 30.0) -> None:
        """Waits until so many workers are linked."""
        await until(lambda: len(self.app[GENERATION].fleet.links) == count, limit_s)

    async def settled(self) -> None:
        """Waits until every ending is written and shipped to SQL."""
        await self.app[DETACHED].join(10)
        metering = self.app[METERING]
        await metering.admission.drain()
        shipper, journal = metering.shipper, metering.journal

        def is_shipped() -> bool:
            """A journal in which nothing has ended yet ships nothing."""
            return shipper.offset >= journal.durable_seq or journal.durable_seq == self.first_seq

        if not is_shipped():
            hurrying = asyncio.create_task(shipper.caught_up(soon=True))
            try:
                await until(is_shipped, 30)
            finally:
                hurrying.cancel()

    async def sql(self, statement: str, **values: Any) -> list[Any]:
        async with self.app[DATABASE].read() as conn:
            return list((await conn.execute(text(statement), values)).all())

    def loses_at_once(self) -> None:
        """Makes each request fail at once whose worker is lost, from now on."""
        self.app[GENERATION].capacity.resume_s = 0

    async def balanced(self, limit_s: float = 30.0) -> None:
        """The equations hold once everything is written and shipped, the workers' own records included."""
        await self.settled()
        deadline = asyncio.get_running_loop().time() + limit_s
        while True:
            is_late = asyncio.get_running_loop().time() > deadline
            async with self.app[DATABASE].read() as conn:
                unwitnessed = await conn.scalar(text(UNWITNESSED))
                report = await books.verify(conn) if is_late or not unwitnessed else None
            if is_late or (report is not None and report.ok):
                assert report is not None and report.ok, report
                assert not unwitnessed
                return
            await asyncio.sleep(0.02)

    async def new_tenant(self, name: str, scopes: Collection[str] = (), **key: Any) -> tuple[str, str]:
        """(tenant id, key) of another tenant, called `name` unless one is called so already."""
        now = int(time.time())
        same = await self.sql("SELECT count(*) FROM tenant WHERE name LIKE :n || '%'", n=name)
        name += f" {same[0][0]}" if same[0][0] else ""
        async with self.app[DATABASE].write() as conn:
            tenant = await tenants.create(conn, name, now=now)
            made = await api_keys.create(conn, PEPPER, tenant_id=tenant.id, now=now, scopes=scopes, **key)
        return tenant.id, made.value


@contextlib.asynccontextmanager
async def running_gateway(
    home: Path,
    redis_url: str,
    database_url: str | None = None,
    max_model_len: int = 2048,
    template: str = TEMPLATE,
    fallbacks: Collection[str] = (),
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    url = database_url or f"sqlite+aiosqlite:///{home / 'headgate.db'}"
    settings.setdefault("limiter_timeout_s", float(os.environ.get("HEADGATE_LIMITER_TIMEOUT_S", "4")))
    keys = await prepare_home(home, url)
    model = write_byte_model(home / "model", max_model_len, template)
    loaded = GatewaySettings(
        home=home,
        redis_url=redis_url,
        database_url=url,
        **{"models": {MODEL: {"path": str(model), "fallbacks": tuple(fallbacks)}}, **settings},
    )
    app = create_app(loaded)
    runner = GatewayRunner(app, ConnectionLimits.of(loaded), shutdown_timeout=2.0)
    await runner.setup()
    try:
        sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        if loaded.tls_files is None:
            await web.SockSite(runner, sock).start()
        else:
            for site in tls.sites(runner, sock, app[tls.CERTIFICATES]):
                await site.start()
        scheme = "http" if loaded.tls_files is None else "https"
        url = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
        yield RunningGateway(app, loaded, url, keys, app[METERING].journal.durable_seq, runner)
    finally:
        await runner.cleanup()


async def prepare_home(home: Path, url: str) -> Credentials:
    """Secrets, schema, a tenant with a key, an admin key and prices. For SQLite a copy of one that was made before."""
    secrets = home / "secrets"
    secrets.mkdir(parents=True, exist_ok=True)
    (secrets / "pepper").write_bytes(PEPPER)
    (secrets / "master.key").write_bytes(b"m" * 32)
    database = Path(url.removeprefix("sqlite+aiosqlite:///"))
    if not url.startswith("sqlite") or database.exists():
        await migrated_database(url)
        return await bootstrap(url, PEPPER, {MODEL: EXAMPLE_RATES}, None)
    template, keys = await asyncio.to_thread(_template)
    shutil.copy(template, database)
    return keys


@functools.cache
def _template() -> tuple[Path, Credentials]:
    """Migrated once per test run."""
    directory = Path(tempfile.mkdtemp(prefix="headgate-test-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    url = f"sqlite+aiosqlite:///{directory / 'headgate.db'}"
    migrated(url)
    keys = asyncio.run(bootstrap(url, PEPPER, {MODEL: EXAMPLE_RATES}, None))
    with sqlite3.connect(directory / "headgate.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return directory / "headgate.db", keys


async def until(condition: Any, limit_s: float = 15.0) -> None:
    """Waits for a condition; fails when it does not come in time."""
    deadline = asyncio.get_running_loop().time() + stretched(limit_s)
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError("the condition did not come true in time")
        await asyncio.sleep(0.01)
