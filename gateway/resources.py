"""The resources of a gateway process from its start to its end: one async generator per resource, in order of need."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

import redis.asyncio
from aiohttp import web
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MasterDownError, ReadOnlyError, RedisError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from accounting.access import api_keys, credentials, principals
from accounting.batches.file_store import FileStore
from accounting.books.equations import EquationResult
from accounting.database import migrate
from accounting.database.db import Database
from accounting.lifecycle import master_key
from accounting.requests import request_log_pruning
from accounting.upstreams import upstreams as stored_upstreams
from accounting.values import clock
from accounting.values.errors import AccountingError, DatabaseUnreachable, SchemaOlder
from accounting.values.types import Principal
from gateway import changes
from gateway.base.app_keys import (
    CACHE_SECRET,
    DATABASE,
    DETACHED,
    FILES,
    FORGETS,
    GROUP_KEY,
    LIFECYCLE,
    PEPPER,
    REDIS,
    RUNNING,
    SETTINGS,
    UPSTREAM_KEY,
)
from gateway.base.checks import Check
from gateway.base.home import Home, HomeError
from gateway.base.jobs_notifier import JOBS_NOTIFIER, JobsNotifier
from gateway.base.lifecycle import Lifecycle, ask_sql, background, uninterrupted
from gateway.base.mail import Mailer
from gateway.base.settings import CannotStartYet, SettingsError
from gateway.books import journal_watch, spending
from gateway.books.bookkeeping import BOOKKEEPING, Bookkeeping
from gateway.books.limiter_truth import limiter_equals_books
from gateway.books.spending import SPENDING
from gateway.configuration import model_sources
from gateway.generation.capacity import Capacity
from gateway.generation.prefixes import FILLER, PREFIXES, Filler, PublicPrefixes
from gateway.generation.served import foreign, model_files
from gateway.generation.served.adapters import ADAPTERS, AdapterKeeper
from gateway.generation.served.models import MODELS, Models
from gateway.generation.stream import GENERATION, GenerationServices
from gateway.http import last_use
from gateway.http.auth import AUTH, Authenticator
from gateway.http.auth_epoch import AUTH_EPOCH, AuthEpoch
from gateway.http.key_lookups import KeyLookups, LookupFailed
from gateway.http.last_use import LAST_USE, LastUse
from gateway.http.upload import UNENDED
from gateway.idempotency import idempotency
from gateway.idempotency.data_keys import DATA_KEYS, DataKeys
from gateway.idempotency.idempotency import KEYED
from gateway.idempotency.retries import MOVE_EVERY_S, RETRIES, Retries
from gateway.intake.body_checker import BODY_CHECKER, BodyChecker
from gateway.intake.intake import INTAKE
from gateway.intake.intake_metrics import IntakeMetrics
from gateway.intake.text_work import TEXT_WORK, TextWork
from gateway.journal.journals import gateway_journals
from gateway.limiter.redis_keys import REVOKED_CHANNEL
from gateway.listening.tls import CERTIFICATES, Certificates
from gateway.messages.line_counts import LINE_COUNTS, LineCounts
from gateway.metering.embedding_models import EMBEDDING_MODELS, EmbeddingModels
from gateway.metering.metering import METERING, metering
from gateway.metering.metering_metrics import MeteringMetrics
from gateway.metering.price_cache import PRICES, PriceCache
from gateway.readiness import (
    ReadinessMetrics,
    RedisProbe,
    of_certificates,
    of_database,
    of_disk,
    of_limiter,
    of_models,
    of_refused,
)
from gateway.routing.links.fleet import Fleet, decode_all
from gateway.routing.links.quarantine import Quarantine
from gateway.routing.links.trust import Trust
from gateway.routing.router import Router
from gateway.routing.router_metrics import RouterMetrics
from gateway.telemetry import access_log, span_export
from gateway.telemetry.keys import OBSERVERS, TRACING
from gateway.telemetry.metrics import METRICS, Metrics, TracingMetrics
from gateway.telemetry.request_log import EVERY_S, RequestLogWriter
from gateway.telemetry.tracing import Tracing
from gateway.upstreams import exchange
from gateway.upstreams.cost_puller import COST_PULLER, LOOK_EVERY_S, CostPuller
from gateway.upstreams.market import MARKET, Market
from gateway.upstreams.serving import SERVE_UPSTREAMS
from gateway.upstreams.upstream_metrics import CostMetrics, UpstreamMetrics
from workers.process.rounds import repeat
from workers.process.tls.certificates import FILES_EVERY_S
from workers.protocol import registry
from workers.protocol.registry import Registration

logger = logging.getLogger(__name__)

REDIS_S = 1.0
LAG_EVERY_S, LAG_REST_S = 0.1, 1.0
"""The seconds between two measurements of the loop's delay: while a request runs, and while none does."""
TRACE_EVERY_S = 5.0
PREFIX_EVERY_S = 0.5
PRUNE_EVERY_S = 60.0
T = TypeVar("T")


async def telemetry(app: web.Application) -> AsyncIterator[None]:
    app[METRICS] = metrics = Metrics(app[SETTINGS].slot)
    settings = app[SETTINGS]
    app[TRACING] = traces = Tracing(
        settings.trace_ratio, settings.trace_parent_from, span_export.exporter(slot=settings.slot)
    )
    metrics.registry.register(TracingMetrics(traces))
    app[OBSERVERS].add(access_log.write)
    for observer in (metrics.observe, traces.observe):
        app[OBSERVERS].of_each(observer)
    async with (
        background(_watch_loop, metrics, app[LIFECYCLE]),
        background(repeat, TRACE_EVERY_S, traces.export_slowest),
    ):
        yield
    await traces.close()


async def certificates(app: web.Application) -> AsyncIterator[None]:
    """Reads the certificates of the base URL and of links to workers, and again when they change."""
    app[CERTIFICATES] = read = await asyncio.to_thread(Certificates.of, app[SETTINGS])
    for collector in read.metrics():
        app[METRICS].registry.register(collector)
    if not read.by_use:
        yield
        return
    async with background(repeat, FILES_EVERY_S, read.look, waits_first=True):
        yield


async def secrets(app: web.Application) -> AsyncIterator[None]:
    """Reads the key files. A key that is derived from the master key has a purpose in its name."""
    master = app[SETTINGS].secret("master.key")
    app[PEPPER] = app[SETTINGS].secret("pepper")
    app[CACHE_SECRET] = hmac.digest(master, b"headgate cache namespaces", hashlib.sha256)
    app[UPSTREAM_KEY] = stored_upstreams.sealing_key(master)
    app[GROUP_KEY] = hmac.digest(master, b"headgate cache groups", hashlib.sha256)
    yield


async def text(app: web.Application) -> AsyncIterator[None]:
    """Opens tokenizers and templates, the threads that use them, and what checks large bodies."""
    settings = app[SETTINGS]
    app[TEXT_WORK] = work = TextWork(settings.text_threads)
    app[BODY_CHECKER] = checker = BodyChecker()
    app[METRICS].registry.register(IntakeMetrics(app[INTAKE], work, checker))
    app[MODELS] = Models({})
    await serve_models(app)
    yield
    work.close()
    await asyncio.to_thread(checker.close)


async def serve_models(app: web.Application) -> None:
    """Reads the served models, at the start and when they may have changed. Raises `SettingsError`, and then those
    before are served on.
    """
    served, settings = app[MODELS], app[SETTINGS]
    bought = {name for source in settings.upstreams.values() for name in source.models}
    found = await asyncio.to_thread(lambda: model_files.load_all(model_sources.of(settings), served.served, bought))
    served.serve(found)
    app[METRICS].serve_models([*found, *served.foreign_ids])


async def database(app: web.Application) -> AsyncIterator[None]:
    """Opens the database. Raises `CannotStartYet` for one that is away or not migrated yet, and `SettingsError` for
    one that this program will never be able to use, or that belongs to another master key.
    """
    url = app[SETTINGS].sql_url
    try:
        await asyncio.to_thread(migrate.check, url)
        app[DATABASE] = database = Database(url)
        async with database.read() as conn:
            is_foreign = await master_key.is_foreign(conn, app[SETTINGS].secret("master.key"))
    except (DatabaseUnreachable, SchemaOlder) as error:
        raise CannotStartYet(str(error)) from None
    except AccountingError as error:
        raise SettingsError(str(error)) from None
    except (DBAPIError, OSError) as error:
        raise CannotStartYet(f"Cannot use the database: {_first_line(error)}.") from None
    except (SQLAlchemyError, ValueError, ImportError) as error:
        raise SettingsError(f"Cannot use the database: {_first_line(error)}.") from None
    if is_foreign:
        await database.close()
        try:
            Home(app[SETTINGS].home).refuse_open_rotation("master.key")
        except HomeError as error:
            raise SettingsError(str(error)) from None
        raise SettingsError(master_key.FOREIGN)
    yield
    await database.close()


async def request_log(app: web.Application) -> AsyncIterator[None]:
    """Writes and prunes the request log. It stays open until the last settlement: its end writes what still waits."""
    settings, database = app[SETTINGS], app[DATABASE]
    writer = RequestLogWriter(database, app[METRICS].registry)
    app[OBSERVERS].of_each(writer.observe)

    def prune() -> Coroutine[Any, Any, int]:
        bounds = {"max_rows": settings.request_log_rows, "max_days": settings.request_log_days}
        return request_log_pruning.prune(database, clock.now_ms(), **bounds)

    async with background(repeat, EVERY_S, writer.write, waits_first=True), background(ask_sql, PRUNE_EVERY_S, prune):
        yield
    await writer.close()


async def stored_texts(app: web.Application) -> AsyncIterator[None]:
    """Opens the stores of files and answers at rest, and the notifier of the jobs process."""
    settings = app[SETTINGS]
    app[DATA_KEYS] = DataKeys(app[DATABASE], settings.secret("master.key"))
    app[UNENDED] = Counter()
    app[FILES] = FileStore(settings.files_dir)
    app[LINE_COUNTS] = LineCounts()
    app[JOBS_NOTIFIER] = JobsNotifier(settings.broker_url)
    app[RETRIES] = Retries(app[DATABASE])
    yield


async def shared_memory(app: web.Application) -> AsyncIterator[None]:
    """Opens the Redis client for registry and revocations. It connects when it is first used, and anew after a refusal of a
    server that has become a replica.
    """
    try:
        app[REDIS] = client = redis.asyncio.from_url(
            app[SETTINGS].redis_url,
            socket_connect_timeout=REDIS_S,
            socket_timeout=REDIS_S,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[ReadOnlyError, MasterDownError],
        )
    except ValueError as error:
        raise SettingsError(f"Cannot use the environment variable HEADGATE_REDIS_URL: {error}.") from None
    yield
    await client.aclose()


async def identities(app: web.Application) -> AsyncIterator[None]:
    """Turns keys into principals; revocations are pulled from SQL and announced by Redis."""
    database, pepper = app[DATABASE], app[PEPPER]

    async def resolve(key: str) -> Principal | None:
        async with database.read() as conn:
            return await principals.resolve(conn, pepper, key, int(time.time()))

    async def genuine(keys: Collection[str]) -> Collection[str]:
        async with database.read() as conn:
            return await api_keys.genuine(conn, pepper, keys, int(time.time()))

    lookups = KeyLookups(lambda key: _asked(resolve(key)), lambda keys: _asked(genuine(keys)))

    def lookup(key: str) -> Awaitable[Principal | None]:
        # Nobody can forge a batch's credential: its MAC was checked.
        return lookups(key) if credentials.parse(key) else _asked(resolve(key))

    def well_formed(key: str) -> bool:
        return any((credentials.parse(key), credentials.parse_batch(pepper, key), credentials.parse_run(pepper, key)))

    app[AUTH] = auth = Authenticator(lookup, well_formed, is_lasting=lambda key: credentials.parse(key) is not None)
    app[PRICES] = prices = PriceCache(database)
    app[AUTH_EPOCH] = epoch = AuthEpoch()
    app[FORGETS] = [auth.forget, prices.forget]
    app[LAST_USE] = used = LastUse()
    app[EMBEDDING_MODELS] = EmbeddingModels(database, app[DETACHED])
    async with (
        background(changes.pull_epoch, database, epoch, auth, prices, app[RUNNING]),
        background(ask_sql, last_use.EVERY_S, lambda: used.write(database), waits_first=True),
    ):
        yield


async def upstreams(app: web.Application) -> AsyncIterator[None]:
    """Opens the way to upstreams, reads those that are stored again and again, and what their providers bill."""
    app[MARKET] = market = Market()
    app[METRICS].registry.register(UpstreamMetrics(market))
    async with exchange.new_session() as session:
        market.open(session)
        app[SERVE_UPSTREAMS] = serve = foreign.ForeignModels(app).serve
        await serve()
        app[COST_PULLER] = puller = CostPuller(market, app[DATABASE])
        app[METRICS].registry.register(CostMetrics(puller))
        gone = (SQLAlchemyError, OSError)
        async with (
            background(app[AUTH_EPOCH].follow, serve),
            background(repeat, LOOK_EVERY_S, puller.look, forgives=gone, waits_first=True),
        ):
            yield


async def engine(app: web.Application) -> AsyncIterator[None]:
    """Starts metering, then workers: the journal is replayed before anything can be asked of a worker."""
    settings, client = app[SETTINGS], app[REDIS]

    async def look() -> list[Registration] | None:
        try:
            names = [n for n in await client.smembers(registry.WORKERS) if isinstance(n, bytes)]
            found = [registry.worker_key(name.decode()) for name in sorted(names)]
            values = await client.mget(found) if found else []
            return decode_all([value for value in values if isinstance(value, bytes)])
        except (RedisError, OSError):
            return None

    async with metering(
        database=app[DATABASE],
        redis_url=settings.redis_url,
        slot=settings.slot,
        directory=settings.journal_dir,
        metrics=MeteringMetrics(app[METRICS].registry, app[METRICS].model_label),
        limiter_timeout_s=settings.limiter_timeout_s,
        shipped=app[TRACING].shipped,
        prices=app[PRICES],
    ) as metered:
        app[METERING] = metered
        group_key = app[GROUP_KEY]
        trust = Trust(app[CERTIFICATES].links, settings.link_plain)
        fleet = Fleet(look, metered.shipper.keep, group_key, Quarantine(settings.quarantine_s), trust)
        router = Router(group_key)
        app[METRICS].registry.register(RouterMetrics(router, fleet, lambda: app[MODELS].vocabularies))
        lifecycle = app[LIFECYCLE]
        lifecycle.num_workers = fleet.num_workers
        app[GENERATION] = GenerationServices(
            metered.admission,
            fleet,
            router,
            app[DETACHED],
            lifecycle,
            app[RUNNING],
            app[SPENDING],
            Capacity(fleet, app[MARKET], router, settings.overflow_after_s, settings.resume_s),
        )
        hearers = {REVOKED_CHANNEL: app[FORGETS], registry.NEWS: [fleet.look_soon]}
        async with background(changes.hear_changes, app[REDIS], hearers), background(fleet.run):
            lifecycle.started = True
            yield
            await app[DETACHED].join(10.0)
            await fleet.finish_records()


async def readiness(app: web.Application) -> AsyncIterator[None]:
    """Provides the checks that `/readyz` reports."""
    metered, fleet = app[METERING], app[GENERATION].fleet
    probe = RedisProbe(app[REDIS], metered.owner)

    def checks() -> list[Check]:
        return [
            of_database(app[AUTH], metered.shipper),
            *of_limiter(probe.asked),
            of_disk(metered.journal),
            *of_certificates(app[CERTIFICATES].by_use),
            of_refused(fleet.refused),
            *of_models(app[MODELS].vocabularies, fleet.links),
        ]

    app[LIFECYCLE].checks = checks
    app[METRICS].registry.register(ReadinessMetrics(checks))
    async with background(probe.run):
        yield


async def spending_limits(app: web.Application) -> AsyncIterator[None]:
    """Watches the organization's own limit, and alerts of spending."""
    settings = app[SETTINGS]
    mailer = Mailer(settings.smtp_url, settings.mail_from) if settings.smtp_url else None
    app[SPENDING] = limit = spending.OrganizationLimit()
    database = app[DATABASE]
    async with (
        background(spending.watch_limit, database, app[AUTH_EPOCH], limit),
        background(spending.watch_alerts, database, mailer),
    ):
        yield


async def public_prefixes(app: web.Application) -> AsyncIterator[None]:
    """Reads the operator's registered prefixes again and again, and fills them on every linked worker."""
    app[PREFIXES] = known = PublicPrefixes(app[CACHE_SECRET])
    served = app[GENERATION]
    app[FILLER] = filler = Filler(known, served.admission, app[MODELS])
    async with (
        background(changes.pull_prefixes, app[DATABASE], app[AUTH_EPOCH], known),
        background(repeat, PREFIX_EVERY_S, lambda: filler.look(served.fleet.links)),
    ):
        yield
    filler.close()


async def idempotency_keys(app: web.Application) -> AsyncIterator[None]:
    database, slot, keyed = app[DATABASE], app[SETTINGS].slot, app[KEYED]

    def sweep() -> Coroutine[Any, Any, None]:
        return idempotency.sweep(database, slot, keyed)

    async with (
        background(ask_sql, idempotency.SWEEP_EVERY_S, sweep, waits_first=True),
        background(ask_sql, MOVE_EVERY_S, app[RETRIES].move, waits_first=True),
    ):
        yield


async def adapters(app: web.Application) -> AsyncIterator[None]:
    """Reads the operator's registered adapters again and again, and loads them on every linked worker."""
    app[ADAPTERS] = keeper = AdapterKeeper(app[MODELS])
    fleet = app[GENERATION].fleet
    async with (
        background(changes.pull_adapters, app[DATABASE], app[AUTH_EPOCH], keeper),
        background(repeat, PREFIX_EVERY_S, lambda: keeper.look(fleet.links)),
    ):
        yield


async def bookkeeping(app: web.Application) -> AsyncIterator[None]:
    """Seals days and checks the books."""
    settings, database = app[SETTINGS], app[DATABASE]

    async def limiter_truth() -> EquationResult:
        journals = gateway_journals(settings.journals_dir)
        return await limiter_equals_books(database, app[METERING].link, journals)

    app[BOOKKEEPING] = keeper = Bookkeeping(database, app[METRICS].registry, settings.invoice_automatic, limiter_truth)
    async with background(keeper.run):
        yield


async def journals(app: web.Application) -> AsyncIterator[None]:
    """Watches for journals that nobody replays, and for damaged ones. Gateways that run are found by their sockets."""
    settings = app[SETTINGS]
    Home(settings.home).make_run()
    watch = journal_watch.JournalWatch(app[DATABASE], app[METRICS].registry, settings.journals_dir, settings.run_dir)
    async with background(ask_sql, journal_watch.EVERY_S, watch.look):
        yield


ALL: list[Callable[[web.Application], AsyncIterator[None]]] = [
    telemetry,
    certificates,
    secrets,
    text,
    database,
    request_log,
    stored_texts,
    shared_memory,
    identities,
    spending_limits,
    upstreams,
    engine,
    readiness,
    public_prefixes,
    adapters,
    idempotency_keys,
    bookkeeping,
    journals,
]


async def _watch_loop(metrics: Metrics, lifecycle: Lifecycle) -> None:
    loop = asyncio.get_running_loop()
    while True:
        every_s = LAG_EVERY_S if lifecycle.num_running else LAG_REST_S
        due = loop.time() + every_s
        await asyncio.sleep(every_s)
        metrics.loop_lag.observe(max(0.0, loop.time() - due))


async def _asked(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await uninterrupted(work)
    except (SQLAlchemyError, OSError) as error:
        raise LookupFailed from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
