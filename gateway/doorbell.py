"""Rings for the jobs processes: a Celery message without arguments. SQL says what to do.

A ring that is lost costs one sweep, so a broker that is away is a line in the log and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import Any

from accounting.batches import DOORBELL, QUEUE, RING_EXPIRES_S

logger = logging.getLogger(__name__)

RING_S = 2.0


class Doorbell:
    def __init__(self, broker_url: str | None) -> None:
        """None: there is nobody to ring; sweepers find the work by themselves."""
        self._broker_url = broker_url

    async def ring(self, traceparent: str = "") -> None:
        """Returns at once when the broker is quick, and after `RING_S` when it is not."""
        if self._broker_url is None:
            return
        try:
            async with asyncio.timeout(RING_S):
                await asyncio.to_thread(self._send, traceparent)
        except TimeoutError:
            logger.warning("doorbell_slow")

    def _send(self, traceparent: str) -> None:
        from kombu.exceptions import OperationalError

        try:
            self._celery.send_task(
                DOORBELL, queue=QUEUE, expires=RING_EXPIRES_S, retry=False, ignore_result=True,
                headers={"traceparent": traceparent} if traceparent else {},
            )  # fmt: skip
        except (OperationalError, OSError) as error:
            logger.warning("doorbell_failed", extra={"reason": str(error)[:200]})

    @cached_property
    def _celery(self) -> Any:
        # Celery takes half a second to import, and most gateways serve no batch: it is loaded by the first ring.
        from celery import Celery

        options = {"socket_timeout": RING_S, "socket_connect_timeout": RING_S}
        app = Celery("headgate.doorbell", broker=self._broker_url, set_as_current=False)
        app.conf.update(broker_transport_options=options, broker_connection_timeout=RING_S)
        return app
