"""A reload that fails leaves what is served as it is, or says that it does not. Each that asks gets an outcome of its own."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from byte_model import write_byte_model
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

from accounting.database.db import DatabaseUnreachable
from gateway.base.home import Home, HomeError
from gateway.cli import reload as command
from gateway.cli import up as module
from gateway.cli.main import main
from gateway.cli.model import ServedModel, WantedModel
from gateway.cli.model_workers import Change
from gateway.cli.preparation import Preparation
from gateway.cli.supervisor import Spec
from gateway.cli.up import Options, Up

FAULTS = [
    HomeError("No such model."),
    DatabaseUnreachable("The database cannot be used."),
    OperationalError("SELECT 1", {}, Exception("server closed the connection")),
    OSError(errno.EAGAIN, "Resource temporarily unavailable"),
    ValueError("a fault of ours"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("is_writable", [True, False])
async def test_a_fault_of_a_reload_is_said_and_the_next_one_is_heard(tmp_path, fault, is_writable):
    said: list[str] = []

    async def publish() -> None:
        raise fault

    reloaded = tmp_path / ("." if is_writable else "missing") / "reloaded.json"
    up = SimpleNamespace(
        reload_asked=asyncio.Event(),
        models=(),
        home=SimpleNamespace(reloaded=reloaded),
        _publish=publish,
        _say=said.extend,
    )
    task = asyncio.create_task(Up._reload_when_asked(up))
    for num_heard in (1, 2):
        up.reload_asked.set()
        async with asyncio.timeout(30):
            while sum("stay as they were" in line for line in said) < num_heard:
                assert not task.done(), task.exception()
                await asyncio.sleep(0)
    assert reloaded.exists() == is_writable
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Workers:
    def __init__(self) -> None:
        self.counts, self.started, self.stopped = {}, [], []

    def change(self, models, draining):
        self.drained = draining
        return Change(["new"], [SimpleNamespace(name="worker-0")])

    def place_change(self, change):
        return [SimpleNamespace(name="worker-1")]

    def told(self) -> list[str]:
        return []

    async def start(self, places) -> None:
        self.started += [place.name for place in places]

    async def stop(self, places) -> None:
        self.stopped += [place.name for place in places]


class Gateways:
    fault: HomeError | None = None
    """The end of the wait until the models are known, which is the second one."""
    num_waits = 0

    async def draining(self) -> set[str]:
        return {"worker-0"}

    async def wait(self, _) -> None:
        self.num_waits += 1
        if self.num_waits == 2 and self.fault:
            raise self.fault


@pytest.fixture
async def serving(tmp_path, monkeypatch):
    """A run that serves the model `old` and is asked for `new`."""
    home = Home(tmp_path / "home")
    home.prepare()
    up = Up(Options(home, "127.0.0.1", 0, 1, None))

    async def prepared(_) -> None:
        pass

    old, new = [SimpleNamespace(id=name, source={}) for name in ("old", "new")]
    monkeypatch.setattr(module, "resolve_all", lambda _: (new,))
    monkeypatch.setattr(module, "check_room", lambda *_: None)
    up.models, up.workers, up.gateways = (old,), Workers(), Gateways()
    up.preparation = SimpleNamespace(check=lambda *_: None, prepare_database=prepared, price_notes=())
    return up


async def outcome(up: Up) -> dict[str, object]:
    task = asyncio.create_task(up._reload_when_asked())
    up.reload_asked.set()
    async with asyncio.timeout(30):
        while not up.home.reloaded.exists():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return json.loads(up.home.reloaded.read_bytes())


async def test_a_list_of_models_that_cannot_be_written_takes_the_new_workers_back(serving, monkeypatch):
    def full() -> None:
        raise HomeError("The disk is full.")

    monkeypatch.setattr(serving, "_tell_gateways", full)
    found = await outcome(serving)
    assert (found["error"], found["models"]) == ("The models stay as they were: The disk is full.", ["old"])
    assert serving.workers.stopped == ["worker-1"]


async def test_a_new_worker_that_is_killed_while_it_loads_is_taken_back_at_once(serving, monkeypatch):
    """The supervisor starts it again, as one that serves: it might be killed for ever."""

    async def start(places) -> None:
        for place in places:
            killed = ["/bin/sh", "-c", "echo loading; kill -KILL $$"]
            await serving.supervisor.start(Spec("worker", place.name, killed, os.environ))

    async def wait(is_done) -> None:
        while not await is_done(0):  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)

    async def serves(*_) -> bool:
        return False

    async def stop(places) -> None:
        await asyncio.gather(*(serving.supervisor.remove(place.name) for place in places))

    serving.supervisor.ready = True
    monkeypatch.setattr(serving.workers, "start", start)
    monkeypatch.setattr(serving.workers, "stop", stop)
    monkeypatch.setattr(serving.gateways, "wait", wait)
    monkeypatch.setattr(serving.gateways, "serves", serves, raising=False)
    began = time.monotonic()
    found = await outcome(serving)
    assert time.monotonic() - began < 10
    assert found["models"] == ["old"]
    assert str(found["error"]).startswith("The models stay as they were: worker-1 ended with signal SIGKILL")
    assert serving.supervisor.processes() == {}


async def test_a_model_that_gateways_could_not_read_is_refused_before_a_worker_starts(serving, tmp_path, monkeypatch):
    """A gateway would go on with the tokenizer that it had, and its tokens would go to the new weights."""
    path = write_byte_model(tmp_path / "model")
    (path / "chat_template.jinja").write_text("{% if")
    broken = ServedModel("old", path, WantedModel(str(path), "old"))
    monkeypatch.setattr(module, "resolve_all", lambda _: (broken,))
    serving.preparation.check = Preparation(serving.home, "", "", migrates=False).check
    found = await outcome(serving)
    assert found["models"] == ["old"]
    assert str(found["error"]).startswith(
        f"The models stay as they were: Cannot serve the model old from {path}: the chat template does not compile"
    )
    assert serving.workers.started == []


async def test_workers_that_drain_are_told_to_who_chooses_those_that_stay(serving):
    await outcome(serving)
    assert (serving.workers.drained, serving.workers.started) == ({"worker-0"}, ["worker-1"])


async def test_a_gateway_that_does_not_read_the_new_models_is_no_reload_without_effect(serving):
    serving.gateways.fault = HomeError("This took more than 600 s. It waits for gateway 0 to read its models.")
    found = await outcome(serving)
    assert str(found["error"]).startswith(
        "The models are published, but the change is not complete: This took more than"
    )
    assert (found["models"], serving.workers.stopped) == (["new"], [])


def test_the_outcome_of_a_reload_that_began_before_is_not_taken_for_the_own_one(tmp_path, monkeypatch):
    home = Home(tmp_path)
    home.prepare()
    earlier = time.monotonic()

    def write(model: str, began_at: float) -> None:
        found = {"error": "", "models": [model], "began_at": began_at}
        home.reloaded.write_text(json.dumps(found))

    def asked(*_: object) -> None:
        write("others", earlier)
        threading.Timer(0.5, lambda: write("own", time.monotonic())).start()

    monkeypatch.setattr(Home, "runs_as", lambda _: 1)
    monkeypatch.setattr(command.os, "kill", asked)
    done = CliRunner().invoke(main, ["reload", "--home", str(tmp_path)])
    assert done.output == "Served now: own.\n"
