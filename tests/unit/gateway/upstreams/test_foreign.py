"""The models of upstreams as a gateway serves them: their tokenizers are files of others, and changes come at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byte_model import write_byte_model

from gateway.base.app_keys import DATABASE, SETTINGS, UPSTREAM_KEY
from gateway.base.settings import ModelSource, SettingsError
from gateway.base.upstream_source import UpstreamModel, UpstreamSource
from gateway.generation.served import foreign, model_files
from gateway.generation.served.models import MODELS, Models
from gateway.telemetry.metrics import METRICS
from gateway.upstreams.market import MARKET, Market
from gateway.upstreams.wires.values import Upstream

A = Upstream("mock", UpstreamSource(url="http://127.0.0.1:1/v1", models={"a": UpstreamModel()}))


@pytest.mark.parametrize("spec", ['{"added_tokens": []}', "[]", "{", '{"added_tokens": [5]}'])
def test_a_tokenizer_that_cannot_be_read_is_named_and_stops_no_other_model(tmp_path: Path, spec: str) -> None:
    """The library raises bare exceptions: gateways learned of no change any more, and then did not start."""
    directory = write_byte_model(tmp_path / "model", 2048)
    (directory / "tokenizer.json").write_text(spec)
    assert foreign._counter(str(directory)) is None
    with pytest.raises(SettingsError, match="tokenizer"):
        model_files.load("m", ModelSource(path=str(directory)))


class World:
    """A gateway without a database, whose reading of tokenizers can be held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: Sequence[Upstream] = ()
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.market, self.models = Market(), Models({})
        read = foreign.served

        async def all_stored(conn: None) -> Sequence[Upstream]:
            return self.stored

        def served(links: Any) -> Any:
            if "a" in links:
                self.began.set()
                assert self.goes_on.wait(10)
            return read(links)

        def in_force(ours: Any, kept: Sequence[Upstream], key: bytes) -> Sequence[Upstream]:
            return kept

        monkeypatch.setattr(foreign.upstreams, "all_stored", all_stored)
        monkeypatch.setattr(foreign.stored, "in_force", in_force)
        monkeypatch.setattr(foreign, "served", served)
        app: Any = {
            DATABASE: self,
            SETTINGS: SimpleNamespace(upstreams={}),
            UPSTREAM_KEY: b"",
            MODELS: self.models,
            METRICS: SimpleNamespace(serve_models=lambda names: None),
            MARKET: self.market,
        }
        self.serve = foreign.ForeignModels(app).serve

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        yield None

    async def started(self) -> asyncio.Task[None]:
        """A reading that has come to a tokenizer."""
        task = asyncio.create_task(self.serve())
        await asyncio.to_thread(self.began.wait, 10)
        return task


async def test_of_two_changes_the_later_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed upstream's models were served until the next change."""
    world = World(monkeypatch)
    world.stored = [A]
    first = await world.started()
    world.stored = []
    second = asyncio.create_task(world.serve())
    for _ in range(20):
        await asyncio.sleep(0)
    world.goes_on.set()
    await asyncio.gather(first, second)
    assert (list(world.market.links), world.models.foreign_ids) == ([], ())


async def test_a_change_whose_client_has_gone_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models were not served until the next change."""
    world = World(monkeypatch)
    world.stored = [A]
    task = await world.started()
    task.cancel()
    await asyncio.sleep(0)
    world.goes_on.set()
    await asyncio.gather(task, return_exceptions=True)
    assert (list(world.market.links), world.models.foreign_ids) == (["a"], ("a",))


async def test_a_reading_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.stored = [A]
    with monkeypatch.context() as patch:
        patch.setattr(foreign, "served", lambda links: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await world.serve()
    world.goes_on.set()
    await world.serve()
    assert world.models.foreign_ids == ("a",)
