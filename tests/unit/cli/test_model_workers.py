"""Which workers start and stop when the models change, and what a start waits for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from load import stretched

from gateway.base.home import HomeError
from gateway.base.output_formats import TOOL_FORMATS
from gateway.cli import model_workers
from gateway.cli.devices import Room
from gateway.cli.gateway_probes import awaited, missing
from gateway.cli.main import main
from gateway.cli.model import ServedModel, WantedModel, resolve_all, with_tool_formats
from gateway.cli.model_workers import ModelWorkers, WorkerSlot, check_memory, news
from gateway.cli.supervisor import Supervisor


def model(name: str, num_workers: int = 1, path: str = "/m", **env: str) -> ServedModel:
    return ServedModel(name, Path(path), WantedModel(path, name, num_workers, env))


def running(*models: ServedModel) -> ModelWorkers:
    workers = ModelWorkers(None, Path("/run"), lambda **more: more)
    every = [one for one in models for _ in range(one.wanted.num_workers)]
    workers.places = [WorkerSlot(slot, one, Room(), None) for slot, one in enumerate(every)]
    return workers


def slots(change):
    return [one.id for one in change.new], [place.slot for place in change.gone]


def test_a_model_that_stays_keeps_its_workers():
    workers = running(model("a"), model("b", 2))
    assert slots(workers.change([model("b", 2), model("a")])) == ([], [])
    assert workers.counts == {"a": 1, "b": 2}


def test_models_and_copies_come_and_go():
    workers = running(model("a"), model("b", 2))
    assert slots(workers.change([model("a", 3), model("c")])) == (["a", "a", "c"], [1, 2])
    assert slots(workers.change([model("b")])) == ([], [0, 2])


def test_another_directory_or_setting_means_another_worker():
    workers = running(model("a"))
    assert slots(workers.change([model("a", path="/other")])) == (["a"], [0])
    assert slots(workers.change([model("a", HEADGATE_ENGINE_QUANT="int8")])) == (["a"], [0])


def test_a_worker_that_drains_is_replaced_and_never_kept_instead_of_another_one():
    """It takes nothing new, so a model that it alone would serve would answer 503."""
    workers = running(model("a", 2))
    assert slots(workers.change([model("a")], {"worker-0"})) == ([], [0])
    assert slots(workers.change([model("a", 2)], {"worker-0"})) == (["a"], [0])
    assert slots(workers.change([model("a")], {"worker-0", "worker-1"})) == (["a"], [0, 1])


def test_the_format_of_tool_calls_is_chosen_for_one_model_or_for_all():
    models = (WantedModel("/m/one"), WantedModel("org/two", told={"aliases": ["x"]}), WantedModel("/m/three", "third"))

    def chosen(*given: str) -> list[str | None]:
        return [one.told.get("tool_format") for one in with_tool_formats(models, given)]

    assert chosen() == [None, None, None]
    assert chosen("kimi") == ["kimi", "kimi", "kimi"]
    assert chosen("kimi", "org/two=cohere", "third=gemma4", "one=llama") == ["llama", "cohere", "gemma4"]
    assert with_tool_formats(models, ["kimi"])[1].told["aliases"] == ["x"]
    with pytest.raises(HomeError, match=r"--tool-format qwen9 is not known; known are hermes, .*, harmony\."):
        with_tool_formats(models, ["qwen9"])
    with pytest.raises(HomeError, match=r"--tool-format four=kimi names no model that is served: these are "):
        with_tool_formats(models, ["four=kimi"])


def test_up_refuses_an_unknown_format_in_a_sentence_and_help_lists_all(tmp_path):
    made = CliRunner().invoke(main, ["up", "--home", str(tmp_path), "--tool-format", "qwen9"])
    assert made.exit_code == 1
    assert "--tool-format qwen9 is not known; known are hermes, qwen3_coder" in made.output
    shown = " ".join(CliRunner().invoke(main, ["up", "--help"]).output.split())
    for name in TOOL_FORMATS:
        assert re.search(rf"\b{name}\b", shown.replace("- ", "")), name


def test_free_slots_are_filled_first(monkeypatch, tmp_path):
    workers = running(model("a"), model("b"), model("c"))
    del workers.places[1]
    new = workers.place([model("d", 2, str(tmp_path))])
    try:
        assert [place.slot for place in new] == [1, 3]
    finally:
        for place in new:
            place.ops.close()


@pytest.fixture
def served(monkeypatch):
    """Makes workers on a machine with 8 cores and that number of GPUs."""
    started = []

    def make(num_devices: int, *models: ServedModel, num_ranks: int = 1) -> ModelWorkers:
        monkeypatch.setattr(model_workers, "visible_devices", lambda _: [str(number) for number in range(num_devices)])
        monkeypatch.setattr(model_workers.os, "sched_getaffinity", lambda _: range(8))
        workers = ModelWorkers(None, Path("/run"), lambda **more: more, num_ranks)
        workers.place(models)
        started.append(workers)
        return workers

    yield make
    for workers in started:
        workers.close()


async def reload(workers: ModelWorkers, *models: ServedModel) -> list[WorkerSlot]:
    change = workers.change(models)
    new = workers.place_change(change)
    workers._supervisor = Supervisor(Path("/logs"), lambda: None)
    await workers.stop(change.gone)
    return new


def devices(places: list[WorkerSlot]) -> list[tuple[str, ...]]:
    return [place.room.devices for place in places]


async def test_a_worker_that_replaces_another_one_has_the_gpu_on_which_none_runs(served):
    workers = served(2, model("a", path="/a"))
    assert devices(await reload(workers, model("a", path="/b"))) == [("1",)]
    assert devices(await reload(workers, model("a", path="/c"))) == [("0",)]


async def test_a_new_model_has_the_gpu_of_the_one_that_left(served):
    workers = served(3, model("a"), model("b"), model("c"))
    await reload(workers, model("b"), model("c"))
    assert devices(await reload(workers, model("b"), model("c"), model("d"))) == [("0",)]


async def test_a_new_model_shares_the_gpu_with_the_least_weights_and_takes_what_is_left_of_it(served, tmp_path):
    for name, size in (("large", 900), ("small", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * size)
    small, large = model("small", path=str(tmp_path / "small")), model("large", path=str(tmp_path / "large"))
    workers = served(2, small, large)
    (new,) = await reload(workers, small, large, model("new", path=str(tmp_path / "large")))
    assert new.room == Room(("0",), 0.9)


async def test_the_ranks_that_a_model_names_for_itself_are_gpus_of_its_workers(served):
    large, small = model("large", HEADGATE_ENGINE_TENSOR_PARALLEL="2"), model("small")
    workers = served(4, large, small)
    assert devices(workers.places) == [("0", "1"), ("2",)]
    assert devices(await reload(workers, large, small, model("third"))) == [("3",)]


async def test_a_worker_that_sees_all_gpus_uses_the_first_ones(served):
    workers = served(4, model("a", path="/a"), num_ranks=2)
    assert devices(workers.places) == [()]
    assert devices(await reload(workers, model("a", path="/b"))) == [("2", "3")]


async def test_a_worker_that_does_not_load_its_model_is_not_waited_for_without_end(served, monkeypatch, tmp_path):
    workers = served(1, model("a"), model("b"))
    workers._supervisor = Supervisor(tmp_path, lambda: None)
    monkeypatch.setattr(model_workers, "LIMIT_S", 0.2)
    async with asyncio.timeout(stretched(10)):
        with pytest.raises(HomeError, match=r"worker-1 has not loaded its model within 0 s\."):
            await workers._until_loaded(workers.places[1])


async def test_a_worker_that_replaces_another_one_has_as_many_cores(served):
    workers = served(0, model("a", path="/a"))
    (new,) = await reload(workers, model("a", path="/b"))
    assert workers.spec(new).env["HEADGATE_THREADS"] == "8"


def test_what_a_start_waits_for_names_the_models():
    wanted = {"a": 1, "b": 2}
    assert missing(wanted, {"a": 1, "b": 1}) == ["1 of 2 workers of b"]
    checks = [
        {"name": "database"},
        {"name": "model:b", "state": "failing", "message": "No worker of this model is linked."},
        {"name": "limiter", "state": "failing", "message": "Off."},
        {"name": "certificate:https", "state": "degraded", "message": "The certificate ends within a week."},
    ]
    assert awaited(0, wanted, {"b": 2}, checks) == "gateway 0, which has 0 of 1 workers of a: Off"
    assert awaited(0, wanted, {"b": 2}, checks[3:]) == "gateway 0, which has 0 of 1 workers of a"
    assert awaited(1, wanted, wanted, []) == "gateway 1"


def test_weights_that_do_not_fit_together_are_refused_with_the_numbers(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 3000)
    both = [model("a", 1, str(tmp_path)), model("b", 2, str(tmp_path))]
    monkeypatch.setattr(model_workers, "free_memory", lambda: 8999)
    with pytest.raises(HomeError, match=r"need 0\.00 GiB of memory \(a 0\.00 GiB, b 0\.00 GiB\)"):
        check_memory(both, {"CUDA_VISIBLE_DEVICES": ""})
    check_memory(both, {"CUDA_VISIBLE_DEVICES": "0"})
    monkeypatch.setattr(model_workers, "free_memory", lambda: 9000)
    check_memory(both, {"CUDA_VISIBLE_DEVICES": ""})


def test_two_models_of_one_name_are_refused():
    wanted = [WantedModel.read("headgate-demo"), WantedModel.read("headgate-demo")]
    with pytest.raises(HomeError, match=r"Two models have the name headgate-demo: .* --model NAME=headgate-demo"):
        resolve_all(wanted)
    first, second = resolve_all([wanted[0], WantedModel.read("other=headgate-demo")])
    assert (first.id, second.id, first.path) == ("headgate-demo", "other", second.path)
    with pytest.raises(HomeError, match="NAME=DIRECTORY_OR_HUB_ID"):
        WantedModel.read("=x")


def test_a_start_says_which_worker_takes_long_and_with_what():
    records = {
        "worker-0": {"event": "weights_read", "share": 0.42},
        "worker-1": {"event": "kernels_compiling"},
        "worker-2": {"event": "worker_ready"},
        "worker-3": {},
    }
    said = "worker-0 has read 42% of its weights, worker-1 compiles the kernels of this CPU, which it does once"
    assert news(records) == said
