"""The eyes on ended requests. Those that end in one turn of the loop are shown together, after their answers were written:
each observer then runs over all of them while its code and its data are in the processor's caches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context

from gateway.telemetry.record import RequestRecord

logger = logging.getLogger(__name__)

Observer = Callable[[Sequence[RequestRecord]], None]


class Observers:
    """The observers of one process and event loop."""

    def __init__(self) -> None:
        self._all: list[Observer] = []
        self._ended: list[RequestRecord] = []

    def add(self, observer: Observer) -> None:
        """Adds a function that is called with requests that have ended, each of them once."""
        self._all.append(observer)

    def of_each(self, observer: Callable[[RequestRecord], None]) -> None:
        """Adds a function that takes one request at a time. If it fails, the other requests are still shown."""

        def observe(records: Sequence[RequestRecord]) -> None:
            for record in records:
                try:
                    observer(record)
                except Exception:  # no fault of one request may hide the others
                    logger.exception("request_not_observed", extra={"request_id": record.request_id})

        self.add(observe)

    def publish(self, record: RequestRecord) -> None:
        """Shows an ended request in the next turn of the loop, or in the one after its settlement, if that outlives it."""
        if record.settling is not None and not record.settling.done():
            record.settling.add_done_callback(lambda _: self.publish(record))
            return
        self._ended.append(record)
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._show, context=Context())  # it is of no one request

    def _show(self) -> None:
        ended, self._ended = self._ended, []
        for observer in self._all:
            try:
                observer(ended)
            except Exception:  # no fault of one observer may hide the requests from the others
                logger.exception("requests_not_observed")
