"""Responses in the background whose gateway has gone are run anew: this module finds them in SQL and asks a gateway.

The gateway claims the response and runs it by itself, so nothing is held here, and a lost or doubled request costs a
look that finds nothing.
"""

from __future__ import annotations

import logging

import aiohttp

from accounting.access.credentials import run_credential
from accounting.batches.claims import now_ms
from accounting.database.db import Database
from accounting.responses import runs
from workers.jobs.base import gateways
from workers.jobs.base.settings import JobsSettings

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 100
ASK_S = 10.0


class Restarts:
    def __init__(self, settings: JobsSettings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._asked_until = ""
        """The last response of the last look, where more may follow; then the next look begins behind it, so that those
        that a gateway refuses hold up no others."""

    async def look(self) -> int:
        """Asks for the run of each response that nobody runs. Returns how many were asked for."""
        async with self._database.read() as conn:
            due = await runs.due(conn, await now_ms(conn), ASKED_AT_ONCE, after=self._asked_until)
        self._asked_until = due[-1] if len(due) == ASKED_AT_ONCE else ""
        if not due:
            return 0
        pepper = self._settings.secret("pepper")
        async with gateways.session(self._settings, aiohttp.ClientTimeout(total=ASK_S)) as session:
            for response_id in due:
                await self._ask(session, response_id, run_credential(pepper, response_id))
        return len(due)

    async def _ask(self, session: aiohttp.ClientSession, response_id: str, credential: str) -> None:
        url = f"{gateways.base_url(self._settings)}/v1/responses/{response_id}/run"
        try:
            async with session.post(url, headers={"authorization": f"Bearer {credential}"}) as answer:
                if answer.status != 202:
                    logger.warning("response_not_restarted", extra={"response": response_id, "status": answer.status})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("response_not_restarted", extra={"response": response_id, "reason": str(error)[:200]})
