"""A request whose worker is lost goes on on another one: its client gets the same answer, and pays for it once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from fakes import VOCAB_SIZE, ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, until
from inline_grammars import InlineGrammars
from load import stretched

from gateway.generation.stream import GENERATION
from workers.engine.values.abilities import Abilities
from workers.protocol.messages import Failed, Finished, Message

T = TypeVar("T")
VOCABULARY = [bytes([i]) for i in range(256)] + [b""] * (VOCAB_SIZE - 256)
MESSAGES = [{"role": "user", "content": "Tell me a long story."}]


class Workers:
    """Scripted workers with journals, which may end and begin again in their slots."""

    def __init__(self, folder: Path, redis_url: str, gateway: RunningGateway) -> None:
        self._folder, self._redis_url, self._gateway = folder, redis_url, gateway
        self._running: list[ScriptedWorker] = []
        self._num_begun = 0

    async def begin(self, slot: int = 0, tokens_per_s: float = 300.0, **options: Any) -> ScriptedWorker:
        self._num_begun += 1
        worker = ScriptedWorker(
            self._folder / f"w{self._num_begun}.sock",
            redis_url=self._redis_url,
            slot=slot,
            tokens_per_s=tokens_per_s,
            journal_dir=self._folder / f"journal-{slot}",
            grammars=InlineGrammars(VOCABULARY),
            **options,
        )
        await worker.__aenter__()
        self._running.append(worker)
        await self._gateway.workers(len(self._running))
        return worker

    async def end(self, worker: ScriptedWorker) -> None:
        """Ends it as a killed process ends, with all that it had not sent."""
        self._running.remove(worker)
        worker.crash()
        await worker.__aexit__()

    async def close(self) -> None:
        for worker in [*self._running]:
            self._running.remove(worker)
            await worker.__aexit__()


@pytest.fixture
async def workers(tmp_path: Path, redis_url: str, bare_gateway: RunningGateway) -> AsyncIterator[Workers]:
    found = Workers(tmp_path, redis_url, bare_gateway)
    yield found
    await found.close()


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "seed": 7, **more}


async def answer(session: aiohttp.ClientSession, **more: Any) -> dict[str, Any]:
    async with session.post("/v1/chat/completions", json=body(**more)) as response:
        found = await response.json()
        assert response.status == 200, found
        return found


async def streamed(session: aiohttp.ClientSession, **more: Any) -> tuple[dict[int, str], dict[str, Any]]:
    """Returns the text of each choice, and the last event with usage."""
    texts: dict[int, str] = {}
    last: dict[str, Any] = {}
    wanted = body(stream=True, stream_options={"include_usage": True}, **more)
    async with session.post("/v1/chat/completions", json=wanted) as response:
        assert response.status == 200
        events = (await response.read()).decode().split("\n\n")
    assert events[-2] == "data: [DONE]", events[-3:]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        last = chunk if chunk.get("usage") else last
    return texts, last


async def paid(gateway: RunningGateway) -> list[tuple[str, int, int, int]]:
    """Kind, tokens of the prompt, tokens of the output and charge of each ending."""
    rows = await gateway.sql(
        "SELECT kind, cache_read + cache_write + uncached AS prompt, output, charge FROM ledger_entry"
        " WHERE kind IN ('settle', 'void') ORDER BY request_id"
    )
    return [(row.kind, row.prompt, row.output, row.charge) for row in rows]


async def cut_after(worker: ScriptedWorker, num_tokens: int) -> None:
    """Ends a worker once it has sent so many tokens from now on."""
    wanted = worker.num_tokens_sent + num_tokens
    await until(lambda: worker.num_tokens_sent >= wanted)
    worker.crash()


async def interrupted(workers: Workers, first: ScriptedWorker, asked: Coroutine[Any, Any, T], num_tokens: int) -> T:
    """What comes of a request whose worker ends after so many tokens, and that another one goes on with."""
    cut = asyncio.create_task(cut_after(first, num_tokens))
    going = asyncio.create_task(asked)
    await cut
    await workers.end(first)
    await workers.begin(slot=1)
    return await going


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_stream_goes_on_on_another_worker_and_is_paid_once(
    bare_gateway: RunningGateway, workers: Workers, num_choices: int
) -> None:
    gateway = bare_gateway
    first = await workers.begin()
    async with gateway.session() as session:
        await answer(session, max_tokens=1)  # from here on the prompt is cached
        whole, _ = await streamed(session, n=num_choices)
        texts, last = await interrupted(workers, first, streamed(session, n=num_choices), 20 * num_choices)
        assert texts == whole
        assert last["headgate"]["num_resumes"] == 1
        await workers.begin(slot=0)  # what the lost worker had counted is in its journal
        await gateway.balanced()
    _, before, after = await paid(gateway)
    assert before == after
    assert before[2] == 60 * num_choices
    [row] = await gateway.sql("SELECT sum(cache_write + uncached) AS prompt FROM ledger_entry WHERE kind = 'resume'")
    assert row.prompt > 0  # the second worker has computed the prompt once more, and nobody pays for that


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["never said"]},
        {"max_tokens": 300},  # beyond the first lease
        {"frequency_penalty": 1.5, "min_tokens": 50},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 9},
                },
            }
        },
    ],
    ids=["plain", "logprobs", "stop", "long", "penalties", "schema"],
)
async def test_an_answer_in_one_body_is_the_same_as_without_a_loss(
    bare_gateway: RunningGateway, workers: Workers, more: dict[str, Any]
) -> None:
    first = await workers.begin()
    async with bare_gateway.session() as session:
        await answer(session, max_tokens=1)
        whole = await answer(session, **more)
        found = await interrupted(workers, first, answer(session, **more), 25)
    assert found["choices"] == whole["choices"]
    assert found["usage"] == whole["usage"]
    assert (whole["headgate"]["num_resumes"], found["headgate"]["num_resumes"]) == (0, 1)
    assert found["headgate"]["charge_micro_units"] == whole["headgate"]["charge_micro_units"]


async def test_a_request_whose_worker_ends_before_the_first_token_begins_anew_elsewhere(
    bare_gateway: RunningGateway, workers: Workers
) -> None:
    first = await workers.begin()
    async with bare_gateway.session() as session:
        first.runner.hang()
        asked = asyncio.create_task(answer(session))
        await until(lambda: bool(first.engine.attempts))
        await workers.end(first)
        await workers.begin(slot=0)
        found = await asked
    assert found["headgate"]["num_resumes"] == 1
    assert found["usage"]["completion_tokens"] == 60


async def test_the_same_worker_goes_on_behind_a_cut_link(bare_gateway: RunningGateway, workers: Workers) -> None:
    await workers.begin()
    async with bare_gateway.session() as session:
        whole, _ = await streamed(session)
        going = asyncio.create_task(streamed(session))
        [link] = bare_gateway.app[GENERATION].fleet.links
        await until(lambda: link.num_calls == 1 and link.num_unreported_tokens == 0)
        link.abort()
        texts, last = await going
        assert texts == whole
        assert last["headgate"]["num_resumes"] == 1
        await bare_gateway.balanced()


async def test_a_worker_that_is_drained_hands_over_what_it_could_not_finish(
    bare_gateway: RunningGateway, workers: Workers
) -> None:
    first = await workers.begin(drain_s=0.2)
    async with bare_gateway.session() as session:
        whole, _ = await streamed(session, max_tokens=200)
        going = asyncio.create_task(streamed(session, max_tokens=200))
        await until(lambda: bool(first.engine.attempts))
        await workers.begin(slot=1)
        first.service.drain()
        texts, last = await going
        assert texts == whole
        assert last["headgate"]["num_resumes"] == 1
        await bare_gateway.balanced()


async def test_without_another_worker_in_time_the_request_is_lost_and_free(
    bare_gateway: RunningGateway, workers: Workers
) -> None:
    bare_gateway.app[GENERATION].capacity.resume_s = 0.5
    first = await workers.begin()
    async with bare_gateway.session() as session:
        going = asyncio.create_task(session.post("/v1/chat/completions", json=body(stream=True)))
        await cut_after(first, 20)
        await workers.end(first)
        await workers.begin(slot=1, runner=ScriptedRunner(root="other weights", step_s=0.01))
        response = await going
        events = (await response.read()).decode().split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "upstream_lost"
    await bare_gateway.settled()
    assert [kind for kind, *_ in await paid(bare_gateway)] == ["void"]


async def test_an_answer_that_has_come_whole_needs_no_other_worker(
    bare_gateway: RunningGateway, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is lost between the last token and its own last message."""
    first = await workers.begin()
    sent = first.sent
    monkeypatch.setattr(first, "sent", lambda message: None if isinstance(message, Finished) else sent(message))
    async with bare_gateway.session() as session:
        asked = asyncio.create_task(answer(session))
        await until(lambda: first.num_tokens_sent >= 60)
        await workers.end(first)
        found = await asked
        assert found["usage"]["completion_tokens"] == 60
        assert found["headgate"]["num_resumes"] == 0
        await workers.begin(slot=0)
        await bare_gateway.balanced()
    assert [(kind, output) for kind, _, output, _ in await paid(bare_gateway)] == [("settle", 60)]


async def test_a_client_that_leaves_meanwhile_pays_for_what_it_got(
    bare_gateway: RunningGateway, workers: Workers
) -> None:
    first = await workers.begin()
    async with bare_gateway.session() as session:
        response = await session.post("/v1/chat/completions", json=body(stream=True))
        await cut_after(first, 20)
        await workers.end(first)
        await until(lambda: not bare_gateway.app[GENERATION].fleet.links)
        response.close()
        await bare_gateway.settled()
        await workers.begin(slot=0)
        await bare_gateway.balanced()
    [(kind, prompt, output, _)] = await paid(bare_gateway)
    assert (kind, prompt > 0) == ("settle", True)
    assert 0 < output < 60


async def test_a_request_under_which_three_workers_end_is_lost(bare_gateway: RunningGateway, workers: Workers) -> None:
    """Such a request may be what ends them, however late in its output."""
    async with bare_gateway.session() as session:
        worker = await workers.begin()
        going = asyncio.create_task(session.post("/v1/chat/completions", json=body(stream=True, max_tokens=500)))
        for _ in range(3):
            await cut_after(worker, 20)
            await workers.end(worker)
            worker = await workers.begin()
        events = (await (await going).read()).decode().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "upstream_lost"
        assert worker.num_tokens_sent == 0


async def test_a_budget_still_ends_a_request_that_goes_on(bare_gateway: RunningGateway, workers: Workers) -> None:
    """The limiter had refused more before the worker was lost, and nobody asks it again."""
    first = await workers.begin(tokens_per_s=100)
    tenant, key = await bare_gateway.new_tenant("anna")
    budget = {"project_id": tenant, "period": "month", "limit_micro_units": 40}
    async with bare_gateway.session(bare_gateway.keys.admin_key) as session:
        assert (await session.post("/admin/v1/budgets", json=budget)).status == 200
    async with bare_gateway.session(key) as session:
        found = await interrupted(workers, first, answer(session, max_tokens=400, ignore_eos=True), 30)
    assert found["headgate"]["num_resumes"] == 1
    assert found["headgate"]["stop"] == "budget"
    assert 30 < found["usage"]["completion_tokens"] < 200
    assert 20 <= found["headgate"]["charge_micro_units"] <= 40


async def test_each_prompt_of_a_request_goes_on(bare_gateway: RunningGateway, workers: Workers) -> None:
    first = await workers.begin()
    wanted = {"model": MODEL, "prompt": ["one", "two", "three"], "max_tokens": 60, "seed": 7}

    async def ask() -> dict[str, Any]:
        async with bare_gateway.session() as session, session.post("/v1/completions", json=wanted) as response:
            assert response.status == 200
            return await response.json()

    whole = await ask()
    found = await interrupted(workers, first, ask(), 60)
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in whole["choices"]]
    assert found["usage"]["completion_tokens"] == 180
    assert found["headgate"]["num_resumes"] == 1


async def test_vectors_are_made_anew(bare_gateway: RunningGateway, workers: Workers) -> None:
    def runner() -> ScriptedRunner:
        return ScriptedRunner(abilities=Abilities(("embed",), 8, ()), step_s=0.02)

    first = await workers.begin(runner=runner())
    wanted = {"model": MODEL, "input": [f"text {number} " * 20 for number in range(20)]}

    async def ask() -> tuple[list[Any], int]:
        async with bare_gateway.session() as session, session.post("/v1/embeddings", json=wanted) as response:
            found = await response.json()
            assert response.status == 200, found
            return [one["embedding"] for one in found["data"]], found["usage"]["prompt_tokens"]

    whole = await ask()
    asked = asyncio.create_task(ask())
    await until(lambda: bool(first.engine.attempts))
    await workers.end(first)
    await workers.begin(slot=1, runner=runner())
    assert await asked == whole
    await workers.begin(slot=0, runner=runner())
    await bare_gateway.balanced()


async def test_a_key_that_is_revoked_meanwhile_ends_the_request(bare_gateway: RunningGateway, workers: Workers) -> None:
    first = await workers.begin()
    tenant, key = await bare_gateway.new_tenant("leaving")
    async with bare_gateway.session(key) as session:
        response = await session.post("/v1/chat/completions", json=body(stream=True))
        await cut_after(first, 20)
        await workers.end(first)
        async with bare_gateway.session(bare_gateway.keys.admin_key) as admin:
            [found] = (await (await admin.get(f"/admin/v1/keys?project_id={tenant}")).json())["data"]
            assert (await admin.delete(f"/admin/v1/keys/{found['id']}?revoke=immediate")).status == 200
        events = (await response.read()).decode().split("\n\n")
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["code"], "was taken away while" in error["message"]) == ("invalid_api_key", True)
    assert bare_gateway.app[GENERATION].router.counts.resumes == {"resumed": 0, "failed": 0}


async def test_a_suspect_is_refused_when_it_ends_the_next_worker_too(
    bare_gateway: RunningGateway, workers: Workers
) -> None:
    async with bare_gateway.session() as session:
        worker = await workers.begin()
        worker.runner.hang()
        going = asyncio.create_task(session.post("/v1/chat/completions", json=body()))
        for _ in range(2):
            await until(lambda worker=worker: bool(worker.engine.attempts))
            await workers.end(worker)
            worker = await workers.begin()
            worker.runner.hang()
        response = await going
        assert (response.status, (await response.json())["error"]["code"]) == (500, "request_quarantined")
        assert not worker.engine.attempts
        worker.runner.release()


async def test_a_beam_search_begins_anew(bare_gateway: RunningGateway, workers: Workers) -> None:
    first = await workers.begin()
    async with bare_gateway.session() as session:
        await answer(session, max_tokens=1)
        whole = await answer(session, use_beam_search=True, n=3, temperature=0)
        asked = asyncio.create_task(answer(session, use_beam_search=True, n=3, temperature=0))
        await until(lambda: bool(first.engine.attempts))
        await asyncio.sleep(0.1)
        await workers.end(first)
        await workers.begin(slot=1)
        found = await asked
        await workers.begin(slot=0)
        await bare_gateway.balanced()
    assert found["choices"] == whole["choices"]
    assert found["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert found["headgate"]["num_resumes"] == 1
    charges = [charge for _, _, output, charge in await paid(bare_gateway) if output > 1]
    assert charges == [one["headgate"]["charge_micro_units"] for one in (whole, found)], "each is paid once"


async def test_the_turns_of_other_suspects_are_no_time_without_a_worker(
    bare_gateway: RunningGateway, workers: Workers
) -> None:
    """Thirty were in their first steps. They go on one after the other, which takes longer than a worker is waited for."""
    bare_gateway.app[GENERATION].capacity.resume_s = 1.0
    first = await workers.begin()
    first.runner.hang()
    async with bare_gateway.session() as session:
        messages = [[{"role": "user", "content": f"Story {number}."}] for number in range(30)]
        asked = [asyncio.create_task(answer(session, messages=one, max_tokens=20)) for one in messages]
        await until(lambda: len(first.engine.attempts) == 30)
        await workers.begin(slot=1, tokens_per_s=200.0)
        began = time.monotonic()
        await workers.end(first)
        found = await asyncio.gather(*asked)
    assert {one["headgate"]["num_resumes"] for one in found} == {1}
    assert time.monotonic() - began > 1.0


async def test_a_worker_that_is_silent_gets_no_request_of_a_lost_one(
    bare_gateway: RunningGateway, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all workers hang at once, each would end under the same request, which would be refused for that."""
    first, second = await workers.begin(slot=0), await workers.begin(slot=1)
    links = {link.registration.worker: link for link in bare_gateway.app[GENERATION].fleet.links}
    monkeypatch.setattr(type(links[second.worker]), "is_silent", property(lambda link: link is links[second.worker]))
    first.runner.hang()
    second.runner.hang()
    async with bare_gateway.session() as session:
        asked = asyncio.create_task(answer(session))
        await until(lambda: bool(first.engine.attempts or second.engine.attempts))
        if second.engine.attempts:
            first, second = second, first  # the property reads the name anew
        await workers.end(first)
        await asyncio.sleep(0.5)
        assert not second.engine.attempts
        await workers.begin(slot=int(first.worker[-1]))
        assert (await asked)["headgate"]["num_resumes"] == 1
        assert not second.engine.attempts
        second.runner.release()


async def test_a_worker_of_another_model_with_the_same_weights_is_none(
    bare_gateway: RunningGateway, workers: Workers
) -> None:
    bare_gateway.app[GENERATION].capacity.resume_s = 0.5
    first = await workers.begin()
    async with bare_gateway.session() as session:
        going = asyncio.create_task(session.post("/v1/chat/completions", json=body(stream=True)))
        await cut_after(first, 20)
        await workers.end(first)
        await workers.begin(slot=1, model="another name")
        async with asyncio.timeout(stretched(10)):
            events = (await (await going).read()).decode().split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "upstream_lost"


async def test_a_worker_that_is_full_is_asked_again(
    bare_gateway: RunningGateway, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await workers.begin()
    async with bare_gateway.session() as session:
        whole, _ = await streamed(session)
        going = asyncio.create_task(streamed(session))
        await cut_after(first, 20)
        monkeypatch.setattr("workers.engine.step.request_validator.MAX_PRESENT", 0)
        await workers.end(first)
        second = await workers.begin(slot=1)
        refused: list[Failed] = []
        sent = second.sent

        def note(message: Message) -> Message | None:
            refused.extend([message] if isinstance(message, Failed) else [])
            return sent(message)

        monkeypatch.setattr(second, "sent", note)
        await until(lambda: bool(refused))
        monkeypatch.setattr("workers.engine.step.request_validator.MAX_PRESENT", 10_000)
        texts, last = await going
        assert texts == whole
        assert last["headgate"]["num_resumes"] > 1
        await workers.begin(slot=0)
        await bare_gateway.balanced()
