"""Whatever a client sends within the API's description, and beside it, no answer is a 5xx, and every answer is one that
the description promises. Schemathesis makes the requests: right ones and wrong ones by turns.
"""

from __future__ import annotations

import asyncio
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
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import api_routes
from gateway.schema import openapi

NUM_REQUESTS = [10, pytest.param(50, marks=pytest.mark.rest), pytest.param(2000, marks=pytest.mark.slow)]
"""Requests for each operation, half of them right ones and half wrong ones."""
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
    directory = tmp_path_factory.mktemp("gateway")
    redis_url = f"unix://{redis_socket}?db=3"
    async with (
        running_gateway(directory / "home", redis_url) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url),
    ):
        await gateway.workers(1)
        yield gateway


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_every_answer_is_one_that_the_description_promises(
    gateway: RunningGateway, path: str, method: str, num_requests: int
) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    operation = schema[path][method]
    scope = DOCUMENT["paths"][path][method]["x-headgate-scope"]
    key = gateway.keys.admin_key if scope == "admin" else gateway.keys.api_key
    await asyncio.to_thread(_try_all, operation, gateway.url, key, num_requests)


def _try_all(operation: Any, url: str, key: str, num_requests: int) -> None:
    session = requests.Session()
    session.headers["authorization"] = f"Bearer {key}"
    has_input = bool(operation.definition.raw.keys() & {"parameters", "requestBody"})
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if has_input else (GenerationMode.POSITIVE,):
        cases = operation.as_strategy(generation_mode=mode)

        @hypothesis.settings(
            max_examples=num_requests // 2 if has_input else 1,
            deadline=None,
            database=None,
            derandomize=num_requests <= 50,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=cases)
        def check(case: Any) -> None:
            response = case.call(base_url=url, session=session, timeout=30)
            for _ in range(40):
                if not _was_busy(response):
                    break
                time.sleep(0.25)
                response = case.call(base_url=url, session=session, timeout=30)
            case.validate_response(response, checks=CHECKS)

        check()


def _was_busy(response: Any) -> bool:
    """The worker runs in this process. When making requests keeps the process busy for seconds, the worker is lost and
    Redis seems silent; both return."""
    return response.status_code == 503 and any(said in response.content for said in (b'"no_worker"', b'"unready"'))
