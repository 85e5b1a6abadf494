"""The spend limit over all tenants together, as this process last read it, and mail for spend alerts that became due.

No limiter spans tenants, so the bound holds within seconds, not exactly; the tenants' own budgets are exact.
"""

from __future__ import annotations

import logging
import time

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.limits import spend_alerts, spend_limits
from accounting.limits.spend_alerts import DueAlert
from accounting.values import clock
from accounting.values.currencies import places, unit, written
from gateway.base import errors
from gateway.base.lifecycle import ask_sql, uninterrupted
from gateway.base.mail import Mailer, MailFailed
from gateway.http.auth_epoch import AuthEpoch
from workers.process.rounds import repeat

logger = logging.getLogger(__name__)

EVERY_S = 1.0
ALERTS_EVERY_S = 20.0


class OrganizationLimit:
    """The organization's limit. `watch_limit` updates it; each admission checks it."""

    def __init__(self) -> None:
        self.reached = False
        self.is_set = False

    def check(self) -> None:
        """Checks the limit. Raises `ApiError` 429."""
        if self.reached:
            raise errors.too_many(
                "You exceeded your current quota: the spend limit of the organization is reached.",
                None,
                type="insufficient_quota",
                code="insufficient_quota",
            )


async def watch_limit(database: Database, epoch: AuthEpoch, limit: OrganizationLimit) -> None:
    """Reads the limit again and again while one is set, for what is spent rises. The last value stays in force while SQL
    does not answer.
    """

    async def read() -> None:
        async with database.read() as conn:
            reached = await spend_limits.reached(conn, clock.now_ms())
        limit.is_set, limit.reached = reached is not None, bool(reached)

    look = epoch.reading(read)
    await ask_sql(EVERY_S, lambda: read() if limit.is_set else look())


async def watch_alerts(database: Database, mailer: Mailer | None) -> None:
    """Sends due alerts. It runs separately from the limit, which must not wait for a slow mail server."""

    async def look() -> None:
        for due in await uninterrupted(_note_due(database)):
            await _tell(database, due, mailer)

    await repeat(ALERTS_EVERY_S, look, forgives=(SQLAlchemyError, OSError))


async def _note_due(database: Database) -> list[DueAlert]:
    """Notes due alerts. It looks in a snapshot first: a process that finds nothing takes no write transaction."""
    async with database.read() as conn:
        if not await spend_alerts.any_due(conn, clock.now_ms()):
            return []
    async with database.write() as conn:
        return await spend_alerts.note_due(conn, clock.now_ms())


async def _tell(database: Database, due: DueAlert, mailer: Mailer | None) -> None:
    logger.warning("spend_alert_due", extra={"alert": due.alert.id, "tenant": due.alert.tenant_id})
    if mailer is None:
        return
    try:
        await mailer.send(due.alert.recipients, _subject(due), _text(due))
    except MailFailed as error:
        logger.error("spend_alert_not_sent", extra={"alert": due.alert.id, "reason": str(error)})
        return
    try:
        async with database.write() as conn:
            await spend_alerts.sent(conn, due, clock.now_ms())
    except (SQLAlchemyError, OSError):
        logger.warning("spend_alert_sent_not_noted", extra={"alert": due.alert.id})


def _subject(due: DueAlert) -> str:
    prefix = f"{due.alert.subject_prefix} " if due.alert.subject_prefix else ""
    return f"{prefix}Spend alert: {written(due.micro_units, due.currency)} {due.currency} this month"


def _text(due: DueAlert) -> str:
    # The mail says what was spent in whole units that can be paid, rounded down: the threshold is passed either way.
    smallest = unit(places(due.currency))
    spent = written(due.spent_micro_units // smallest * smallest, due.currency)
    month = time.strftime("%B %Y", time.gmtime(due.period_start_ms / 1000))
    return (
        f"{due.tenant_name} has spent {spent} {due.currency} in {month} (UTC).\n"
        f"The alert was set at {written(due.micro_units, due.currency)} {due.currency}; it is sent once a month.\n"
    )


SPENDING = web.AppKey("spending", OrganizationLimit)
