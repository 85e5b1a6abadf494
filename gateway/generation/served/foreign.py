"""The served models that upstreams alone answer for: made of what is declared, for no directory of ours describes them."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from accounting.upstreams import upstreams
from gateway.base.app_keys import DATABASE, SETTINGS, UPSTREAM_KEY
from gateway.base.lifecycle import uninterrupted
from gateway.generation.served.models import MODELS, ServedModel
from gateway.schema.sampling import Defaults
from gateway.telemetry.metrics import METRICS
from gateway.text.tokenizer import ModelTokenizer
from gateway.upstreams import stored
from gateway.upstreams.market import MARKET, UpstreamLink
from gateway.upstreams.wires.values import Counter
from workers.process.byte_level import BYTE_OF_CHAR

logger = logging.getLogger(__name__)


class ForeignModels:
    """Serves the models of the upstreams in force. Readings wait for each other, so that the last change holds."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._alone = asyncio.Lock()
        self._served = app[MARKET].links
        """The links whose models are served."""

    async def serve(self) -> None:
        """Reads the upstreams in force, and serves their models, also if the caller is cancelled meanwhile."""
        await uninterrupted(self._serve())

    async def _serve(self) -> None:
        app, market = self._app, self._app[MARKET]
        async with self._alone:
            async with app[DATABASE].read() as conn:
                kept = await upstreams.all_stored(conn)
            market.replace(stored.in_force(stored.declared(app[SETTINGS].upstreams), kept, app[UPSTREAM_KEY]))
            if (links := market.links) is not self._served:
                app[MODELS].serve_foreign(await asyncio.to_thread(served, links))
                app[METRICS].serve_models([*app[MODELS].served, *app[MODELS].foreign_ids])
                self._served = links


def served(links: Mapping[str, UpstreamLink]) -> dict[str, ServedModel]:
    """Returns the models by name. Reads the declared tokenizers, so it runs in a thread."""
    return {name: _model(name, link) for name, link in links.items()}


def _model(name: str, link: UpstreamLink) -> ServedModel:
    hello = link.hello
    assert hello is not None
    models = [place.upstream.model(name) for place in link.places]
    return ServedModel(
        id=name,
        tokenizer=_no_tokenizer(),
        template=None,
        max_model_len=hello.max_model_len,
        max_output_tokens=link.max_output_tokens,
        defaults=Defaults(),
        created=int(time.time()),
        is_foreign=True,
        counter=next((counter for model in models if (counter := _counter(model.tokenizer)) is not None), None),
    )


@functools.lru_cache(maxsize=64)
def _counter(directory: str) -> Counter | None:
    """Returns the witness of a declared tokenizer. One that cannot be read is named in the log, and bytes witness."""
    if not directory:
        return None
    try:
        return ModelTokenizer.load(Path(directory)).count
    except (OSError, ValueError) as error:
        logger.warning("upstream_tokenizer_unreadable", extra={"why": str(error)[:200]})
        return None


@functools.cache
def _no_tokenizer() -> ModelTokenizer:
    """Stands where a model needs a tokenizer and nothing is tokenized: each byte is a token."""
    spec: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": dict(BYTE_OF_CHAR), "merges": []},
    }
    return ModelTokenizer(spec)
