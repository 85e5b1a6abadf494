"""`/v1/embeddings`, `/v1/rerank` and `/v1/score` on a running gateway, with the unmodified client, down to the ledger."""

from __future__ import annotations

import base64
import json
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from fakes import BOS, VECTOR_SIZE, ScriptedRunner, ScriptedWorker, scripted_vector
from gateways import MODEL, PEPPER, RunningGateway, running_gateway
from load import stretched
from redis_db import emptied

from accounting.access import api_keys
from gateway.base.app_keys import DATABASE
from workers.engine.values.abilities import Abilities
from workers.engine.values.probe import Pooled

pytestmark = pytest.mark.asyncio(loop_scope="module")

ABILITIES = Abilities(("embed", "score"), VECTOR_SIZE, (4,), pairs="segments", reuses_kv=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    directory = tmp_path_factory.mktemp("embeddings")
    redis_url = emptied(redis_socket, 2)
    runner = ScriptedRunner(abilities=ABILITIES, num_blocks=1024)
    async with (
        running_gateway(directory / "home", redis_url) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url, runner=runner, journal_dir=directory / "w0"),
    ):
        await gateway.workers(1)
        yield gateway


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.client(timeout=stretched(90)) as client:
        yield client


def ids(text: str) -> list[int]:
    return list(text.encode())


def vector(text, **probe) -> list[float]:
    tokens = ids(text) if isinstance(text, str) else text
    found = array("f")
    found.frombytes(scripted_vector(tokens, Pooled(len(tokens), **probe)))
    return found.tolist()


async def post(gateway: RunningGateway, path: str, body, key: str | None = None, **headers: str):
    async with gateway.session(key) as session:
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        given = {"content-type": "application/json"} | headers
        async with session.post(path, data=data, headers=given) as answer:
            return answer.status, await answer.json(), answer.headers


async def embed(gateway: RunningGateway, given, **more):
    return await post(gateway, "/v1/embeddings", {"model": MODEL, "input": given} | more)


async def test_the_client_gets_the_vector_of_each_input_in_order(client):
    texts = [f"text number {n}" * (n + 1) for n in range(40)]
    answer = await client.embeddings.create(model=MODEL, input=texts)  # it asks for base64 by itself
    assert [one.index for one in answer.data] == list(range(40))
    assert [one.embedding for one in answer.data] == [pytest.approx(vector(text)) for text in texts]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(ids(text)) for text in texts)
    assert answer.model == MODEL and answer.object == "list"


async def test_floats_are_the_numbers_of_base64(gateway):
    _, one, _ = await embed(gateway, "the same text", encoding_format="float")
    _, other, _ = await embed(gateway, "the same text", encoding_format="base64")
    data = base64.b64decode(other["data"][0]["embedding"])
    assert array("f", data).tolist() == one["data"][0]["embedding"]
    assert data == scripted_vector(ids("the same text"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", ["text"]),
        (["text"], ["text"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2, 3], [4]], [[1, 2, 3], [4]]),
        (["a", "b"], ["a", "b"]),
        ([BOS], [[BOS]]),
    ],
)
async def test_every_shape_of_an_input_is_taken(gateway, given, expected):
    status, body, _ = await embed(gateway, given)
    assert status == 200, body
    assert [one["embedding"] for one in body["data"]] == [pytest.approx(vector(one)) for one in expected]


async def test_the_most_inputs_are_answered(client):
    texts = [f"{n}" for n in range(2048)]
    answer = await client.embeddings.create(model=MODEL, input=texts)
    assert [one.embedding[0] for one in answer.data] == [len(text) for text in texts]


async def test_usage_is_the_ledgers_to_the_token(gateway):
    """One request of many inputs is one ledger entry; the engine's own record has the same counts."""
    await gateway.settled()
    before = {row[0] for row in await gateway.sql("SELECT request_id FROM ledger_entry")}
    status, body, _ = await embed(gateway, ["some text", "some text", "and another, which is longer than a block"])
    assert status == 200
    await gateway.settled()
    rows = await gateway.sql(
        "SELECT request_id, kind, cache_read, cache_write, uncached, output, charge FROM ledger_entry"
    )
    (row,) = [row for row in rows if row[0] not in before]
    assert row[0] == body["headgate"]["request_id"]
    assert (row[1], row[5]) == ("settle", 0)
    assert sum(row[2:5]) == body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
    assert row[2] == body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert row[6] == body["headgate"]["charge_micro_units"]


async def test_what_was_computed_before_is_cached(gateway):
    text = "a text of more than three blocks, that is asked for twice and computed once"
    _, first, _ = await embed(gateway, text)
    _, second, _ = await embed(gateway, text)
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached[0] == 0 and cached[1] >= 48
    assert first["data"] == second["data"]


async def test_dimensions_are_those_of_the_model(gateway):
    status, body, _ = await embed(gateway, "text", dimensions=4)
    assert status == 200
    assert body["data"][0]["embedding"] == pytest.approx(vector("text", dimensions=4))
    status, whole, _ = await embed(gateway, "text", dimensions=VECTOR_SIZE)
    assert status == 200 and len(whole["data"][0]["embedding"]) == VECTOR_SIZE


async def test_an_idempotency_key_gives_the_same_answer_and_one_charge(gateway):
    body = {"model": MODEL, "input": ["once", "and never again"]}
    answers = [await post(gateway, "/v1/embeddings", body, None, **{"idempotency-key": "vectors-1"}) for _ in range(2)]
    assert answers[0][1] == answers[1][1]
    await gateway.settled()
    request_id = answers[0][1]["headgate"]["request_id"]
    rows = await gateway.sql("SELECT count(*) FROM ledger_entry WHERE request_id = :id", id=request_id)
    assert rows[0][0] == 1


HOSTILE = {
    "no inputs": ({"input": []}, "input"),
    "no input at all": ({"input": None}, "input"),
    "an empty text": ({"input": ""}, "input"),
    "an empty text of several": ({"input": ["a", ""]}, "input[1]"),
    "an empty list of ids": ({"input": [[1], []]}, "input[1]"),
    "a number too many": ({"input": ["x"] * 2049}, "input"),
    "an id beyond the vocabulary": ({"input": [259]}, "input"),
    "a negative id": ({"input": [[-1]]}, "input[0]"),
    "an id of 64 bits": ({"input": [2**63]}, "input"),
    "a float id": ({"input": [1.0]}, "input[0]"),
    "a boolean": ({"input": [True]}, "input[0]"),
    "texts and ids": ({"input": ["a", [1]]}, "input[0]"),
    "an object": ({"input": {"text": "a"}}, "input"),
    "nested too deep": ({"input": [[[1]]]}, "input[0]"),
    "0 dimensions": ({"dimensions": 0}, "dimensions"),
    "negative dimensions": ({"dimensions": -4}, "dimensions"),
    "dimensions of the wrong size": ({"dimensions": 5}, "dimensions"),
    "more dimensions than there are": ({"dimensions": 2**31 - 1}, "dimensions"),
    "dimensions beyond 64 bits": ({"dimensions": 2**70}, None),
    "dimensions in words": ({"dimensions": "NaN"}, "dimensions"),
    "half dimensions": ({"dimensions": 4.5}, "dimensions"),
    "an unknown encoding": ({"encoding_format": "int8"}, "encoding_format"),
    "a text beyond the context": ({"input": "x" * 2049}, "input"),
    "ids beyond the context": ({"input": [[1], [1] * 2049]}, "input[1]"),
    "a cut to nothing": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "a user that is no text": ({"user": 7}, "user"),
    "a stream": ({"stream": True}, "stream"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_body_that_makes_no_sense_is_400_and_names_the_field(gateway, name):
    body, param = HOSTILE[name]
    status, answer, _ = await post(gateway, "/v1/embeddings", {"model": MODEL, "input": "x"} | body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("dimensions", ["NaN", "Infinity", "-0", "1e400"])
async def test_numbers_that_json_has_not_are_400(gateway, dimensions):
    body = f'{{"model": "{MODEL}", "input": "x", "dimensions": {dimensions}}}'
    status, answer, _ = await post(gateway, "/v1/embeddings", body)
    assert status == 400, answer


async def test_many_tokens_together_are_400(gateway):
    status, answer, _ = await embed(gateway, ["x" * 900] * 400)
    assert status == 400 and "300,000" in answer["error"]["message"]


async def test_a_huge_text_is_refused_before_it_is_encoded(gateway):
    status, answer, _ = await embed(gateway, "x" * 900_000)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


async def test_an_input_is_cut_only_if_that_is_asked_for(gateway):
    for given, cut, expected in [("x" * 5000, -1, None), ("hello world", 5, "hello"), ([1, 2, 3, 4], 2, [1, 2])]:
        status, body, _ = await embed(gateway, given, truncate_prompt_tokens=cut)
        assert status == 200, body
        if expected is not None:
            assert body["data"][0]["embedding"] == pytest.approx(vector(expected))
    assert body["usage"]["prompt_tokens"] == 2


async def test_unknown_fields_are_named(gateway):
    _, _, headers = await embed(gateway, "x", colour="blue", user="somebody", input_type="", truncate="NONE")
    assert headers["x-headgate-ignored"] == "colour"


@pytest.mark.parametrize("name", ["input_type", "task", "late_chunking", "output_dimension", "truncate", "lora_path"])
async def test_a_field_that_would_change_the_vectors_is_refused_by_name(gateway, name):
    status, answer, _ = await embed(gateway, "x", **{name: "query"})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, name, "unsupported_parameter")


async def test_a_model_that_gives_vectors_gives_no_text(client):
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        await client.completions.create(model=MODEL, prompt="hi")


async def test_models_say_what_they_can(client):
    (model,) = [one async for one in client.models.list()]
    assert model.capabilities == ["embed", "score"]


async def test_without_the_scope_nothing_is_embedded(gateway):
    async with gateway.app[DATABASE].write() as conn:
        made = await api_keys.create(
            conn, PEPPER, tenant_id=gateway.keys.tenant_id, now=int(time.time()), scopes=("chat",)
        )
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score"):
        status, answer, _ = await post(gateway, path, {"model": MODEL}, made.value)
        assert status == 403 and answer["error"]["code"] == "insufficient_scope"


# --- quotes and reports ---


async def quote(gateway: RunningGateway, body, key: str | None = None):
    return await post(gateway, "/v1/quotes", {"endpoint": "/v1/embeddings", "body": body}, key)


async def test_a_quote_says_what_embeddings_cost_and_binds(gateway):
    body = {"model": MODEL, "input": ["a text that was never asked for, of some blocks", "quoted", "q" * 100]}
    status, made, _ = await quote(gateway, body)
    assert status == 200, made
    assert (made["max_output_tokens"], made["num_cached_tokens"]) == (0, 0)
    headers = {"x-headgate-quote": made["id"]}
    status, other, _ = await post(gateway, "/v1/embeddings", body | {"input": "another"}, None, **headers)
    assert (status, other["error"]["code"]) == (400, "quote_invalid")
    status, answer, _ = await post(gateway, "/v1/embeddings", body, None, **headers)
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == made["num_prompt_tokens"]
    told = answer["headgate"]
    assert told["charge_micro_units"] == made["likely_charge_micro_units"] <= made["max_charge_micro_units"]
    assert told["price_version"] == made["price_version"]
    status, again, _ = await post(gateway, "/v1/embeddings", body, None, **headers)
    assert (status, again["error"]["code"]) == (400, "quote_invalid")
    _, after, _ = await quote(gateway, body)
    cached = (await post(gateway, "/v1/embeddings", body))[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert after["num_cached_tokens"] == cached > 0
    assert after["likely_charge_micro_units"] < made["likely_charge_micro_units"]


async def test_a_quote_of_the_most_inputs_is_made(gateway):
    status, made, _ = await quote(gateway, {"model": MODEL, "input": [f"{n}" for n in range(2048)]})
    assert (status, made["num_prompt_tokens"]) == (200, sum(len(f"{n}") for n in range(2048)))


async def test_a_quote_needs_the_scope_of_its_endpoint(gateway):
    _, chat_key = await gateway.new_tenant("chats", ("chat",))
    _, vector_key = await gateway.new_tenant("embeds", ("embeddings",))
    body = {"model": MODEL, "input": "x"}
    status, refused, _ = await quote(gateway, body, chat_key)
    assert (status, refused["error"]["code"]) == (403, "insufficient_scope")
    assert (await quote(gateway, body, vector_key))[0] == 200
    chat = {"endpoint": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
    assert (await post(gateway, "/v1/quotes", chat, vector_key))[0] == 403


async def test_usage_of_embeddings_is_told_by_itself(gateway):
    tenant_id, key = await gateway.new_tenant("reads", ("embeddings", "usage:read"))
    begin = int(time.time())
    answers = [
        (await post(gateway, "/v1/embeddings", {"model": MODEL, "input": text}, key))[1] for text in ("a", "bcd")
    ]
    await gateway.settled()

    async def results(kind: str, **asked):
        params = {"start_time": begin, "bucket_width": "1d"} | asked
        url = f"/v1/organization/usage/{kind}"
        async with gateway.session(key) as session, session.get(url, params=params) as answer:
            body = await answer.json()
            assert answer.status == 200, body
            return [one for bucket in body["data"] for one in bucket["results"]]

    (found,) = await results("embeddings", group_by="model")
    assert found == {
        "object": "organization.usage.embeddings.result",
        "input_tokens": sum(answer["usage"]["prompt_tokens"] for answer in answers),
        "input_cached_tokens": 0,
        "num_model_requests": 2,
        "project_id": None,
        "user_id": None,
        "api_key_id": None,
        "model": MODEL,
    }
    assert (await results("embeddings", group_by="project_id"))[0]["project_id"] == tenant_id
    assert (await results("completions"))[0]["input_tokens"] == found["input_tokens"]
    assert await results("embeddings", models="another") == []
    async with gateway.session(key) as session:
        url = "/v1/organization/usage/embeddings"
        async with session.get(url, params={"start_time": begin, "group_by": "batch"}) as answer:
            assert answer.status == 400
        async with session.get(url, params={"start_time": begin, "batch": "true"}) as answer:
            assert answer.status == 400


# --- rerank and score ---


def pair_score(first: str, second: str) -> float:
    return vector(ids(first) + ids(second))[0]


async def test_documents_come_in_the_order_of_their_scores(gateway):
    documents = ["a", "a longer one", {"text": "middle"}, "a"]
    body = {"model": MODEL, "query": "what?", "documents": documents}
    status, answer, _ = await post(gateway, "/v1/rerank", body)
    assert status == 200, answer
    assert [one["index"] for one in answer["results"]] == [1, 2, 0, 3]
    assert answer["results"][0] == {
        "index": 1,
        "relevance_score": pair_score("what?", "a longer one"),
        "document": {"text": "a longer one"},
    }
    texts = ["a", "a longer one", "middle", "a"]
    assert answer["usage"]["total_tokens"] == sum(len("what?") + len(text) for text in texts)
    _, few, _ = await post(gateway, "/v1/rerank", body | {"top_n": 2, "return_documents": False})
    assert [sorted(one) for one in few["results"]] == [["index", "relevance_score"]] * 2


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("q", "d", [("q", "d")]),
        ("q", ["d", "dd"], [("q", "d"), ("q", "dd")]),
        (["q", "qq"], ["d", "dd"], [("q", "d"), ("qq", "dd")]),
    ],
)
async def test_pairs_are_scored(gateway, first, second, pairs):
    status, answer, _ = await post(gateway, "/v1/score", {"model": MODEL, "text_1": first, "text_2": second})
    assert status == 200, answer
    assert [one["score"] for one in answer["data"]] == [pair_score(*pair) for pair in pairs]
    assert [one["index"] for one in answer["data"]] == list(range(len(pairs)))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["d"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["d", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["d"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [["d"]]}, "documents[0]"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "instruction": "i"}, "instruction"),
        ("/v1/rerank", {"query": "q" * 1000, "documents": ["d", "d" * 1049]}, "documents[1]"),
        ("/v1/rerank", {"documents": ["d"]}, "query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": 1, "text_2": "b"}, "text_1"),
    ],
)
async def test_pairs_that_make_no_sense_are_400(gateway, path, body, param):
    status, answer, _ = await post(gateway, path, {"model": MODEL} | body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer


async def test_a_pair_is_cut_at_its_second_text(gateway):
    body = {"model": MODEL, "text_1": "query", "text_2": "document", "truncate_prompt_tokens": 8}
    status, answer, _ = await post(gateway, "/v1/score", body)
    assert status == 200 and answer["usage"]["prompt_tokens"] == 8


async def test_every_token_has_a_witness(gateway):
    await gateway.balanced()


# --- another gateway, whose model generates ---


async def test_a_model_that_generates_has_no_usage_of_embeddings(shared_gateway):
    begin = int(time.time())
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    assert (await post(shared_gateway, "/v1/completions", body))[0] == 200
    assert (await post(shared_gateway, "/v1/embeddings", {"model": MODEL, "input": "x"}))[0] == 400
    await shared_gateway.settled()
    found = {}
    for kind in ("completions", "embeddings"):
        async with shared_gateway.session() as session:
            path = f"/v1/organization/usage/{kind}?start_time={begin}"
            async with session.get(path) as answer:
                found[kind] = [one for bucket in (await answer.json())["data"] for one in bucket["results"]]
    assert len(found["completions"]) == 1
    assert found["embeddings"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_a_chat_model_gives_no_vectors(shared_gateway, path, body):
    status, answer, _ = await post(shared_gateway, path, {"model": MODEL} | body)
    assert status == 400
    assert answer["error"]["param"] == "model" and "generates text" in answer["error"]["message"]
