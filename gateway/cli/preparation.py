"""The preparations of `headgate up` while its models load: the schema, the first tenant, the journals of unused slots.

Its libraries take most of a second to load, so `up` imports this module after it has started the workers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Collection, Sequence

import msgspec

from accounting.database import migrate
from accounting.database.db import Database
from accounting.lifecycle.bootstrap import bootstrap
from accounting.prices import price_lists, prices
from accounting.values import clock
from accounting.values.tenant_types import Credentials
from gateway.base.home import Home, HomeError, write_private
from gateway.base.settings import ModelSource
from gateway.cli.banner import banner
from gateway.cli.first_prices import first_rates, price_notes
from gateway.cli.model import ServedModel
from gateway.generation.served import model_files
from gateway.journal.journals import gateway_journals
from gateway.metering.replay import replay
from workers.process.children.forked import give_back

# A start that fails for another reason cancels what runs here, and SQLAlchemy would print a traceback of the connection that it
# closes then. Processes that log do so through their own handlers.
logging.getLogger("sqlalchemy.pool").addHandler(logging.NullHandler())


class Preparation:
    def __init__(self, home: Home, database_url: str, redis_url: str, *, migrates: bool) -> None:
        self._home = home
        self._database_url = database_url
        self._redis_url = redis_url
        self._migrates = migrates
        self.price_notes: list[str] = []
        """A sentence for each served model that is free or has no price, as of the last preparation."""

    async def prepare_database(self, models: Sequence[ServedModel]) -> Credentials:
        """Upgrades the schema, or checks it, and makes the first tenant and first prices."""
        step = migrate.upgrade if self._migrates else migrate.check
        await asyncio.to_thread(step, self._database_url)
        credentials = await bootstrap(
            self._database_url,
            self._home.read_secret("pepper"),
            {model.id: first_rates(model) for model in models},
            self._stored(),
        )
        self._store(credentials)
        self.price_notes = await self._price_notes([model.id for model in models])
        return credentials

    async def replay_unused_slots(self, num_gateways: int) -> None:
        """Replays the journals of gateways that an earlier, larger start left; slots in use do it themselves."""
        slots = gateway_journals(self._home.state)
        unused = sorted(slots.keys() - set(range(num_gateways)))
        if not unused:
            return
        database = Database(self._database_url)
        try:
            for slot in unused:
                found = await replay(database, self._redis_url, slot, slots[slot])
                if found.voided or found.shipped:
                    print(
                        f"{found.slot} is no longer used: {found.shipped} endings of it came into the books, "
                        f"{found.voided} requests that it left open are void.",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            await database.close()

    def check(self, models: Sequence[ServedModel], before: Collection[ServedModel], foreign: Collection[str]) -> None:
        """Raises `SettingsError` for models that gateways would not read: names that do not go together, or a tokenizer
        or template that cannot be used. Models of `before` are read already.
        """
        model_files.check_names({model.id: _source(model) for model in models}, foreign)
        for model in models:
            if model not in before:
                model_files.load(model.id, _source(model))
        give_back()

    def show(self, base_url: str, models: Sequence[ServedModel], credentials: Credentials) -> None:
        """Prints what a user needs, and the keys once only."""
        names = [model.id for model in models]
        print(banner(base_url, names, credentials, self._home.root, self.price_notes), flush=True)
        if credentials.fresh:
            self._store(msgspec.structs.replace(credentials, fresh=False))

    async def _price_notes(self, models: Sequence[str]) -> list[str]:
        database = Database(self._database_url)
        try:
            async with database.read() as conn:
                standard = await price_lists.at(conn, prices.DEFAULT_SHEET, clock.now_ms())
        finally:
            await database.close()
        return price_notes(models, standard)

    def _store(self, credentials: Credentials) -> None:
        write_private(self._home.credentials, msgspec.json.encode(credentials))

    def _stored(self) -> Credentials | None:
        try:
            return msgspec.json.decode(self._home.credentials.read_bytes(), type=Credentials)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            raise HomeError(f"The file {self._home.credentials} cannot be read or is damaged.") from None


def _source(model: ServedModel) -> ModelSource:
    return ModelSource.model_validate(model.source)
