"""Whatever a client sends within the API's description, and beside it, no answer is a 5xx, and every answer is one that
the description promises. Schemathesis makes the requests: right ones and wrong ones by turns.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import hypothesis
import msgspec
import pytest
import requests
import schemathesis
from gateways import MODEL, RunningGateway
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app import api_routes
from gateway.schema import openapi

NUM_SOAKED = int(os.environ.get("HEADGATE_TEST_EXAMPLES", "2000"))
NUM_REQUESTS = [
    10,
    pytest.param(50, marks=pytest.mark.rest),
    pytest.param(NUM_SOAKED, marks=pytest.mark.slow, id="soak"),
]
"""Requests for each operation, half of them right ones and half wrong ones."""
ROUND = 9
"""Requests of one run of Hypothesis. From the eleventh on it varies earlier ones: a third of fifty were sent twice."""
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


@pytest.fixture(scope="module")
def gateway(shared_gateway: RunningGateway) -> RunningGateway:
    return shared_gateway


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
    session.trust_env = False  # else proxies are looked for before each request
    session.headers["authorization"] = f"Bearer {key}"
    has_input = bool(operation.definition.raw.keys() & {"parameters", "requestBody"})
    num_cases = num_requests // 2 if has_input else 1
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if has_input else (GenerationMode.POSITIVE,):
        cases = operation.as_strategy(generation_mode=mode)
        for first in range(0, num_cases, ROUND):
            _try_round(cases, url, session, min(ROUND, num_cases - first), first if num_requests <= 50 else None)


def _try_round(cases: Any, url: str, session: requests.Session, num_cases: int, seed: int | None) -> None:
    @hypothesis.settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        derandomize=seed == 0,
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

    (hypothesis.seed(seed)(check) if seed else check)()


def _was_busy(response: Any) -> bool:
    """The worker runs in this process. When making requests keeps the process busy for seconds, the worker is lost and
    Redis seems silent; both return."""
    return response.status_code == 503 and any(said in response.content for said in (b'"no_worker"', b'"unready"'))
