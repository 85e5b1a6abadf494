"""The sender of webhooks: it claims deliveries from the outbox, sends one signed POST per try, and writes down the
result.

Any number of senders may run at once; none keeps state. Deliveries have no promised order, and they may be repeated: a
try whose result was not written is made again, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.exc import SQLAlchemyError

from accounting.batches import claims
from accounting.database.db import Database
from accounting.events import deliveries, webhooks
from accounting.events.deliveries import Delivery, Queue, Schedule
from accounting.values.errors import AccountingError
from workers.jobs.base.settings import JobsSettings
from workers.jobs.webhooks.egress import NotSpokenTo, Poster
from workers.jobs.webhooks.places import HELD, Places, Try
from workers.process.rounds import repeat, within

logger = logging.getLogger(__name__)

TIDY_S = 60.0
PURGE_S = 20.0
"""The most seconds of a round in which old deliveries are deleted."""
TELL_S = 60.0
"""The least seconds between two log lines about one failing webhook. `headgate webhooks deliveries` shows every try."""
MAX_TOLD = 1_000


class Sender:
    def __init__(
        self, settings: JobsSettings, database: Database, *, registry: CollectorRegistry | None = None
    ) -> None:
        """Makes a sender. `registry` is None if nobody reads metrics."""
        self._database = database
        self._master = settings.secret("master.key")
        self._look_s = settings.look_s
        self._tidy_s = TIDY_S * settings.test_time_scale
        self._schedule = Schedule(random.random, settings.test_time_scale)
        self._threads = ThreadPoolExecutor(HELD, "lookup")
        self._poster = Poster(settings.egress, self._threads, settings.webhook_s)
        self._tries = Counter(
            "headgate_webhook_deliveries",
            "Attempts to deliver an event: delivered, failed (it is tried again), dead (it is not tried again).",
            ("outcome",),
            registry=registry or CollectorRegistry(),
        )
        for outcome in ("delivered", "failed", "dead"):
            self._tries.labels(outcome)
        self._told: dict[str, float] = {}
        """The time of the last log line that a webhook fails, by webhook id."""
        self._places = Places()
        self._woken = asyncio.Event()
        self._claim_failed_at: float | None = None
        """The time of the last log line that SQL does not answer; None while it answers."""
        self._empty_at: int | None = None
        """The version of the database in which no delivery waited: while it is the same, there is nothing to look for."""

    async def run(self) -> None:
        """Sends until the task is cancelled. Deliveries under way then are tried again by the next sender."""
        try:
            async with asyncio.TaskGroup() as group:
                tidying = repeat(self._tidy_s, self._tidy, forgives=(SQLAlchemyError, OSError), on_failure=_not_tidy)
                group.create_task(tidying)
                while True:
                    for claimed in await self._claim():
                        begun = self._places.begin(claimed.queue, time.monotonic())
                        group.create_task(self._deliver(claimed, begun))
                    await within(self._woken, self._look_s)  # a try that ends makes room for another
                    self._woken.clear()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _claim(self) -> list[Delivery]:
        room, shut_out = self._places.room(time.monotonic()), self._places.shut_out(time.monotonic())
        if room <= 0:
            return []
        version = self._database.data_version()
        if version is not None and version == self._empty_at:
            return []
        try:
            found = await self._due(room, shut_out, version)
        except (SQLAlchemyError, OSError) as error:
            self._tell_of_sql(error)
            return []
        self._tell_of_sql(None)
        return found

    async def _due(self, room: int, shut_out: Collection[Queue], version: int | None) -> list[Delivery]:
        """Claims what is due. Raises the errors of SQL."""
        # A read transaction comes first: a sender that finds nothing does not wait for the writer's lock.
        async with self._database.read() as conn:
            if not await deliveries.any_due(conn, await claims.now_ms(conn), shut_out):
                self._empty_at = None if await deliveries.any_waiting(conn) else version
                return []
        async with self._database.write() as conn:
            now = await claims.now_ms(conn)
            return await deliveries.claim(conn, now, room, self._schedule, shut_out)

    def _tell_of_sql(self, error: Exception | None) -> None:
        """Logs the beginning of an outage, that it goes on at most once in `TELL_S`, and its end."""
        now, last = time.monotonic(), self._claim_failed_at
        if error is None:
            if last is not None:
                logger.warning("webhook_claim_back")
            self._claim_failed_at = None
        elif last is None or now - last >= TELL_S:
            logger.error("webhook_claim_failed", exc_info=error)
            self._claim_failed_at = now

    async def _deliver(self, claimed: Delivery, begun: Try) -> None:
        try:
            error = await self._try(claimed)
            self._places.answered(begun, time.monotonic())
            outcome = await self._write_down(claimed, error)
            self._tries.labels(outcome).inc()
            if error is not None:
                self._tell(claimed, error)
            if outcome == "dead":
                logger.warning("webhook_dead", extra={"event_id": claimed.event_id, "webhook": claimed.webhook_id})
        except (SQLAlchemyError, OSError) as error:
            logger.error("webhook_ending_not_written", exc_info=error)
        finally:
            self._places.end(begun)
            self._woken.set()

    def _tell(self, claimed: Delivery, error: str) -> None:
        now = time.monotonic()
        if now - self._told.get(claimed.webhook_id, -TELL_S) < TELL_S:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told[claimed.webhook_id] = now
        place = {"webhook": claimed.webhook_id, "event_id": claimed.event_id}
        logger.warning("webhook_failed", extra={**place, "error": error})

    async def _write_down(self, claimed: Delivery, error: str | None) -> str:
        """Writes the result of the try and returns it. Raises the errors of SQL."""
        async with self._database.write() as conn:
            now = await claims.now_ms(conn)
            if error is None:
                await deliveries.delivered(conn, claimed, now)
                return "delivered"
            return "dead" if await deliveries.failed(conn, claimed, error, now) else "failed"

    async def _try(self, claimed: Delivery) -> str | None:
        """Makes one try. Returns None or the error, in words that reveal nothing about the network behind Headgate."""
        try:
            key = webhooks.signing_key(self._master, claimed.webhook_id, claimed.sealed_secret)
            body = claimed.body.encode()
            headers = headers_of(claimed, key, body)
            status = await self._poster.post(claimed.url, body, headers, only_public=claimed.is_tenants)
        except (NotSpokenTo, AccountingError):
            return "refused"
        except TimeoutError:
            return "timeout"
        except aiohttp.ClientConnectorError as error:
            return "refused" if _was_refused(error) else "no connection"
        except (aiohttp.ClientError, OSError, ValueError):
            return "no connection"
        return None if 200 <= status < 300 else f"status {status}"

    async def _tidy(self) -> None:
        async with self._database.write() as conn:
            await deliveries.tidy(conn, await claims.now_ms(conn))
        until, may_be_more = time.monotonic() + PURGE_S, True
        while may_be_more and time.monotonic() < until:
            async with self._database.write() as conn:
                may_be_more = await deliveries.purge(conn, await claims.now_ms(conn))


def _not_tidy(error: Exception) -> None:
    logger.error("webhook_tidy_failed", exc_info=error)


def headers_of(claimed: Delivery, key: bytes, body: bytes) -> dict[str, str]:
    """Returns the headers of Standard Webhooks. The id is the event's and stays the same; the time is that of the
    try."""
    at = int(time.time())
    return {
        "content-type": "application/cloudevents+json; charset=utf-8",
        "user-agent": "Headgate",
        "webhook-id": claimed.event_id,
        "webhook-timestamp": str(at),
        "webhook-signature": webhooks.sign(key, claimed.event_id, at, body),
    }


def _was_refused(error: BaseException) -> bool:
    return isinstance(error.__cause__, NotSpokenTo) or isinstance(getattr(error, "os_error", None), NotSpokenTo)
