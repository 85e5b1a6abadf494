"""Wakes the jobs processes by a Celery message without arguments. SQL says what work there is.

A lost message delays work until the next sweep, so a broker that is away only costs a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import Any

from aiohttp import web

from accounting.batches.batches import DOORBELL, QUEUE, RING_EXPIRES_S

logger = logging.getLogger(__name__)

NOTIFY_S = 2.0


class JobsNotifier:
    def __init__(self, broker_url: str | None) -> None:
        """A value of None notifies nobody; the sweepers find the work by themselves."""
        self._broker_url = broker_url

    async def notify(self, traceparent: str = "") -> None:
        """Returns at once when the broker is quick, and after `NOTIFY_S` otherwise."""
        if self._broker_url is None:
            return
        try:
            async with asyncio.timeout(NOTIFY_S):
                await asyncio.to_thread(self._send, traceparent)
        except TimeoutError:
            logger.warning("jobs_notifier_slow")

    def _send(self, traceparent: str) -> None:
        from kombu.exceptions import OperationalError

        try:
            self._celery.send_task(
                DOORBELL,
                queue=QUEUE,
                expires=RING_EXPIRES_S,
                retry=False,
                ignore_result=True,
                headers={"traceparent": traceparent} if traceparent else {},
            )
        except (OperationalError, OSError) as error:
            logger.warning("jobs_notifier_failed", extra={"reason": str(error)[:200]})

    @cached_property
    def _celery(self) -> Any:
        # Celery takes half a second to import, and most gateways serve no batch. So the first message imports it.
        from celery import Celery

        options = {"socket_timeout": NOTIFY_S, "socket_connect_timeout": NOTIFY_S}
        app = Celery("headgate.jobs_notifier", broker=self._broker_url, set_as_current=False)
        app.conf.update(broker_transport_options=options, broker_connection_timeout=NOTIFY_S)
        return app


JOBS_NOTIFIER = web.AppKey("jobs_notifier", JobsNotifier)
