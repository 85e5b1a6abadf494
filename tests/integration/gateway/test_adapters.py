"""Adapters registered, served, hidden and let go over HTTP; the model is scripted, files and registry are real."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes import ScriptedWorker
from gateways import MODEL, running_gateway, until

from gateway.generation.stream import GENERATION
from gateway.resources import serve_models

PATH = "/admin/v1/adapters"
LONG = "Tell me of the canal that feeds the lower fields, gate by gate, from the head on. " * 2


async def call(gateway, method, path=PATH, body=None, key=None):
    async with gateway.session(key or gateway.keys.admin_key) as session:
        answer = await session.request(method, path, json=body)
        return answer.status, await answer.json()


@pytest.fixture
def folder(tmp_path):
    def make(name):
        directory = tmp_path / "adapters" / name
        directory.mkdir(parents=True)
        (directory / "adapter").write_text(name)
        return str(directory)

    return make


async def register(gateway, folder, name="poet", **more):
    body = {"model": MODEL, "name": name, "path": folder(name), **more}
    status, made = await call(gateway, "POST", body=body)
    assert status == 200, made
    assert (made["state"], made["served_as"]) == ("loaded", f"{MODEL}:{name}")
    return made


async def complete(gateway, model, key=None, prompt=LONG):
    async with gateway.session(key) as session:
        body = {"model": model, "prompt": prompt, "max_tokens": 4}
        async with session.post("/v1/completions", json=body) as answer:
            return answer.status, await answer.read(), (await answer.json())


async def cached(gateway, model, key=None):
    status, _, reply = await complete(gateway, model, key)
    assert status == 200, reply
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


async def model_ids(gateway, key=None):
    _, found = await call(gateway, "GET", "/v1/models", key=key or gateway.keys.api_key)
    return [model["id"] for model in found["data"]]


async def test_an_adapter_is_served_under_its_own_name_with_kv_of_its_own(gateway, worker, folder):
    made = await register(gateway, folder)
    served = made["served_as"]
    assert await model_ids(gateway) == [MODEL, served]
    assert await cached(gateway, MODEL) == 0
    assert await cached(gateway, served) == 0
    assert await cached(gateway, served) > 0
    assert gateway.app[GENERATION].router.counts.num_predicted_tokens >= 128, "the router knows"
    assert await cached(gateway, MODEL) > 0
    assert {row.adapter for plan in worker.runner.steps for row in plan} == {-1, 0}
    await gateway.balanced()
    rows = await gateway.sql("SELECT DISTINCT model, price_version FROM ledger_entry")
    assert {row.model for row in rows} == {MODEL, served}
    assert len({row.price_version for row in rows}) == 1, "the base model's price"


async def test_adapters_stand_beside_each_other_in_one_batch(gateway, worker, folder):
    names = [(await register(gateway, folder, name))["served_as"] for name in ("a", "b")]
    answers = await asyncio.gather(*(complete(gateway, name) for name in [*names, MODEL] * 3))
    assert {status for status, *_ in answers} == {200}
    mixed = [{row.adapter for row in plan} for plan in worker.runner.steps]
    assert any(len(kinds) > 1 for kinds in mixed)


async def test_anothers_adapter_is_as_if_it_were_not(gateway, folder):
    mine, my_key = await gateway.new_tenant("mine", scopes=["chat"])
    served = (await register(gateway, folder, tenant=mine))["served_as"]
    assert (await complete(gateway, served, my_key))[0] == 200
    assert served in await model_ids(gateway, my_key)
    assert served not in await model_ids(gateway)
    hidden, unknown = (await complete(gateway, served), await complete(gateway, f"{MODEL}:nobody"))
    assert hidden[0] == unknown[0] == 404
    assert hidden[1] == unknown[1]
    status, _ = await call(gateway, "GET", f"/v1/models/{served}", key=gateway.keys.api_key)
    assert status == 404


async def test_an_allow_list_names_adapters_one_by_one(gateway, folder):
    served = (await register(gateway, folder))["served_as"]
    _, base_only = await gateway.new_tenant("base", scopes=["chat"], models=[MODEL])
    _, adapter_only = await gateway.new_tenant("adapter", scopes=["chat"], models=[served])
    assert (await complete(gateway, served, base_only))[0] == 403
    assert (await complete(gateway, MODEL, adapter_only))[0] == 403
    assert (await complete(gateway, served, adapter_only))[0] == 200
    assert await model_ids(gateway, adapter_only) == [served]
    _, limits = await call(gateway, "GET", "/v1/me/limits", key=adapter_only)
    assert {one["model"] for one in limits["data"] if one["level"] == "model"} == {MODEL}, "the base's limits bind it"


async def test_files_that_are_not_there_are_said_and_nothing_is_registered(gateway, tmp_path):
    body = {"model": MODEL, "name": "poet", "path": str(tmp_path / "nothing")}
    status, answer = await call(gateway, "POST", body=body)
    assert (status, answer["error"]["code"]) == (400, "adapter_not_usable")
    assert "cannot be read" in answer["error"]["message"]
    assert (await call(gateway, "GET"))[1]["data"] == []
    assert (await complete(gateway, f"{MODEL}:poet"))[0] == 404
    assert (await complete(gateway, MODEL))[0] == 200, "the worker goes on"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"name": "no:colon"}, 400, "name"),
        ({"path": "relative"}, 400, "path"),
        ({"model": "unknown"}, 404, "model"),
        ({"tenant": "proj_unknown"}, 404, None),
    ],
)
async def test_what_cannot_be_registered_is_refused(shared_gateway, folder, change, status, param):
    body = {"model": MODEL, "name": "poet", "path": folder("poet"), **change}
    found, answer = await call(shared_gateway, "POST", body=body)
    assert (found, answer["error"]["param"]) == (status, param)


async def test_a_name_is_taken_until_its_adapter_is_gone_and_then_another_one(gateway, folder):
    made = await register(gateway, folder)
    body = {"model": MODEL, "name": "poet", "path": made["path"]}
    assert (await call(gateway, "POST", body=body))[0] == 409
    assert await cached(gateway, made["served_as"]) == 0
    status, gone = await call(gateway, "DELETE", f"{PATH}/{made['id']}")
    assert (status, gone["deleted"]) == (200, True)
    assert (await complete(gateway, made["served_as"]))[0] == 404
    assert (await call(gateway, "DELETE", f"{PATH}/{made['id']}"))[0] == 404
    (link,) = gateway.app[GENERATION].fleet.links
    await until(lambda: made["id"] not in link.adapters)
    again = await call(gateway, "POST", body=body)
    assert again[0] == 200
    assert again[1]["id"] != made["id"]


async def test_a_stream_that_runs_ends_before_its_adapter_leaves(tmp_path, redis_url, bare_gateway, folder):
    worker = ScriptedWorker(tmp_path / "slow.sock", redis_url=redis_url, tokens_per_s=4)
    async with worker:
        await bare_gateway.workers(1)
        made = await register(bare_gateway, folder)
        async with bare_gateway.client() as client:
            stream = await client.completions.create(
                model=made["served_as"],
                prompt="x",
                max_tokens=60,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            await anext(stream)
            await call(bare_gateway, "DELETE", f"{PATH}/{made['id']}")
            (link,) = bare_gateway.app[GENERATION].fleet.links
            await until(lambda: link.adapters[made["id"]].state == "unloading")
            worker.runner.step_s = 0.01  # it has been seen: the rest may come quickly
            chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 60
        await until(lambda: made["id"] not in link.adapters)


async def test_a_worker_that_comes_back_has_its_adapters_again(tmp_path, redis_url, bare_gateway, folder):
    async with ScriptedWorker(tmp_path / "one.sock", redis_url=redis_url):
        await bare_gateway.workers(1)
        made = await register(bare_gateway, folder)
    await bare_gateway.workers(0)
    assert (await complete(bare_gateway, made["served_as"]))[0] == 503
    async with ScriptedWorker(tmp_path / "one.sock", redis_url=redis_url):
        await bare_gateway.workers(1)
        (link,) = bare_gateway.app[GENERATION].fleet.links
        await until(lambda: link.has_adapter(made["id"]))
        assert (await complete(bare_gateway, made["served_as"]))[0] == 200


async def test_an_adapter_comes_goes_and_changes_with_its_model_as_models_are_read_again(tmp_path, redis_url, folder):
    file = tmp_path / "models.json"
    path = str(tmp_path / "home" / "model")

    async def read_again(**models):
        file.write_text(json.dumps({name: {"path": path, **more} for name, more in models.items()}))
        await serve_models(gateway.app)

    file.write_text(json.dumps({MODEL: {"path": path}}))
    async with (
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
        running_gateway(tmp_path / "home", redis_url, models_file=file) as gateway,
    ):
        await gateway.workers(1)
        served = (await register(gateway, folder))["served_as"]
        await read_again(**{MODEL: {"max_model_len": 8}})
        status, _, answer = await complete(gateway, served)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        await read_again(another={})
        assert (await complete(gateway, served))[0] == 404
        assert await model_ids(gateway) == [], "the other model has no price"
        await read_again(another={}, **{MODEL: {}})
        assert (await complete(gateway, served))[0] == 200
        assert await model_ids(gateway) == [MODEL, served]
