"""Notes which models give embeddings, each once in this process, so that reports can tell their usage by itself."""

from __future__ import annotations

import logging
import time

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.ledger import embedding_models
from gateway.base.lifecycle import Detached

logger = logging.getLogger(__name__)


class EmbeddingModels:
    """The models that this process has seen giving embeddings."""

    def __init__(self, database: Database, detached: Detached) -> None:
        self._database = database
        self._detached = detached
        self._noted: set[str] = set()

    def note(self, model: str) -> None:
        if model not in self._noted:
            self._noted.add(model)
            _ = self._detached.spawn(self._write(model), "note a model of embeddings")

    async def _write(self, model: str) -> None:
        try:
            async with self._database.write() as conn:
                await embedding_models.note(conn, model, int(time.time()))
        except (SQLAlchemyError, OSError) as error:
            self._noted.discard(model)  # its next request tries again
            logger.warning("a model of embeddings is not noted yet: %s", error)


EMBEDDING_MODELS = web.AppKey("embedding_models", EmbeddingModels)
