"""Whatever a client sends within the API's description, and beside it, no answer is a 5xx, and every answer is one that
the description promises. Schemathesis makes the requests, right ones and wrong ones. Some it lists: each field of the
description by itself at its limits, and beyond them. The others it draws at random, all fields together.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import pytest_asyncio
import requests
import schemathesis
from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from hypothesis import strategies as st
from load import stretched
from redis_db import emptied
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.generation.meta import REQUEST_SHAPE_PROBES, coverage_scenario
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import api_routes
from gateway.schema import openapi

NUM_SOAKED = int(os.environ.get("HEADGATE_TEST_EXAMPLES", "2000"))
NUM_REQUESTS = [
    pytest.param(12, 4, id="12"),
    pytest.param(40, 15, id="40", marks=pytest.mark.rest),
    pytest.param(NUM_SOAKED, NUM_SOAKED // 2, id="soak", marks=pytest.mark.slow),
]
"""Requests for each operation, all different, and how many of them are drawn at least. Half of both are right ones and half
wrong ones; where there are no wrong ones, the right half is all. To draw one takes ten times as long as to list one."""
ROUND = 25
"""Requests of one run of Hypothesis, if its limit of random data allows so many."""
MOST_IN_VAIN = 3
"""Rounds without a new request after which an operation is known to have no other ones."""
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
DOCUMENT: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi.document(api_routes())))
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": "string", "maxLength": 40},
        "tool_call_id": {"const": "call_1"},
    },
    "required": ["role", "content", "tool_call_id"],
}
NARROWED = {
    "model": {"const": MODEL},
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 4},
    "prompt": {"type": "string", "minLength": 1, "maxLength": 40},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
}
"""Fields of texts that are given values with which requests get through to the worker."""
for kind in ("ChatFields", "CompletionFields", "TokenizeFields"):
    properties = DOCUMENT["components"]["schemas"][kind]["properties"]
    properties |= {name: schema for name, schema in NARROWED.items() if name in properties}
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
SCHEMA.config.generation.update(with_security_parameters=False)
"""Each request has a right key. A third of the wrong ones had none, and were refused by the limit of unknown keys."""
OPERATIONS = [
    pytest.param(path, method, id=f"{method.upper()} {path}")
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
]

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning"),  # schemathesis' own
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """Its model ends most texts early: few requests say how long theirs may be, and the limit is 2,048 tokens."""
    directory = tmp_path_factory.mktemp("gateway")
    redis_url = emptied(redis_socket, 3)
    runner = ScriptedRunner(eos_every=16)
    async with (
        running_gateway(directory / "home", redis_url) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url, runner=runner),
    ):
        await gateway.workers(1)
        yield gateway


@pytest.mark.parametrize(("num_requests", "num_drawn"), NUM_REQUESTS)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_every_answer_is_one_that_the_description_promises(
    gateway: RunningGateway, path: str, method: str, num_requests: int, num_drawn: int
) -> None:
    operation = SCHEMA[path][method]
    scope = DOCUMENT["paths"][path][method]["x-headgate-scope"]
    key = gateway.keys.admin_key if scope == "admin" else gateway.keys.api_key
    await asyncio.to_thread(_try_all, operation, gateway.url, key, num_requests, num_drawn)


def _try_all(operation: Any, url: str, key: str, num_requests: int, num_drawn: int) -> None:
    session = requests.Session()
    session.trust_env = False  # else proxies are looked for before each request
    session.headers["authorization"] = f"Bearer {key}"
    modes = _modes(operation)
    has_input = bool(operation.definition.raw.keys() & {"parameters", "requestBody"})
    wanted = num_requests // 2 if has_input else 1
    for mode in modes:
        client = Client(url, session)
        for case in _spread(_listed(operation, mode), wanted - num_drawn // 2 if has_input else 0):
            client.send(case)
        cases = operation.as_strategy(generation_mode=mode)
        seeds = itertools.count() if num_requests <= 60 else itertools.repeat(None)
        in_vain = 0
        while client.num_sent < wanted and in_vain < MOST_IN_VAIN:
            before = client.num_sent
            _try_drawn(cases, client, min(wanted, before + ROUND), next(seeds))
            in_vain = in_vain + 1 if client.num_sent == before else 0


def _modes(operation: Any) -> list[GenerationMode]:
    """No request is a wrong one where all that is sent is a string in the path."""
    raw = operation.definition.raw
    has_wrong = "requestBody" in raw or any(one["schema"] != {"type": "string"} for one in raw.get("parameters", ()))
    return [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if has_wrong else [GenerationMode.POSITIVE]


def _listed(operation: Any, mode: GenerationMode) -> list[Any]:
    """The requests that schemathesis lists, without those of whose answers it would check nothing but that they are no 5xx."""
    config = SCHEMA.config.generation_for(operation=operation, phase="coverage")
    cases = SCHEMA.iter_coverage_cases(operation, generation_modes=[mode], generation_config=config)
    return [case for case in cases if coverage_scenario(case) not in REQUEST_SHAPE_PROBES]


def _spread(cases: list[Any], number: int) -> list[Any]:
    """As many of them, from the whole list: it goes through the fields in their order."""
    return [cases[i * len(cases) // number] for i in range(number)] if len(cases) > number else cases


class Client:
    """Sends what was not sent before, and checks each answer."""

    def __init__(self, url: str, session: requests.Session) -> None:
        self._url = url
        self._session = session
        self._sent: set[str] = set()

    @property
    def num_sent(self) -> int:
        return len(self._sent)

    def send(self, case: Any) -> None:
        said = repr((case.path_parameters, case.query, dict(case.headers), case.cookies, case.media_type, case.body))
        if said in self._sent:
            return
        self._sent.add(said)
        try:
            self._check(case)
        except BaseException:
            self._sent.discard(said)  # Hypothesis sends it again, to show that it fails again
            raise

    def _check(self, case: Any) -> None:
        response = self._answer(case)
        for _ in range(40):
            if not _was_busy(response):
                break
            time.sleep(0.25)
            response = self._answer(case)
        case.validate_response(response, checks=CHECKS)

    def _answer(self, case: Any) -> Any:
        return case.call(base_url=self._url, session=self._session, timeout=stretched(30))


def _try_drawn(cases: Any, client: Client, until: int, seed: int | None) -> None:
    """Sends requests that Hypothesis draws, until so many have been sent.

    All of them are of one of its examples, the second. With an example for each request it would vary earlier ones from the
    eleventh on, and a third of fifty would be known. Its first example is always the simplest, and an empty one here.
    """

    @hypothesis.settings(
        max_examples=2,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(data=st.data())
    def check(data: Any) -> None:
        if data.draw(st.booleans()):
            for _ in range(2 * ROUND):
                if client.num_sent >= until:
                    break
                client.send(data.draw(cases))

    (check if seed is None else hypothesis.seed(seed)(check))()


def _was_busy(response: Any) -> bool:
    """The worker runs in this process. When making requests keeps the process busy for seconds, the worker is lost and
    Redis seems silent; both return."""
    return response.status_code == 503 and any(said in response.content for said in (b'"no_worker"', b'"unready"'))
