"""Errors in the shape of the API that a request speaks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from gateway.base import errors
from gateway.generation.served.models import context_exceeded
from gateway.http.dialects import anthropic_error, refusal, speaks_anthropic
from gateway.telemetry.keys import RECORD
from gateway.telemetry.record import RequestRecord

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("path", "headers", "speaks"),
    [
        ("/v1/messages", {}, True),
        ("/v1/messages?beta=true", {}, True),
        ("/v1/messages/batches/x", {}, True),
        ("/v1/messagesx", {}, False),
        ("/v1/chat/completions", VERSION, False),
        ("/v1/models", {}, False),
        ("/v1/models", VERSION, True),
        ("/v1/models/m", VERSION, True),
    ],
)
def test_the_dialect_of_a_request(path: str, headers: dict[str, str], speaks: bool) -> None:
    assert speaks_anthropic(make_mocked_request("POST", path, headers)) is speaks


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.invalid("No."), "invalid_request_error"),
        (errors.unauthorized(), "authentication_error"),
        (errors.forbidden("insufficient_scope", "No."), "permission_error"),
        (errors.not_found(), "not_found_error"),
        (errors.method_not_allowed("GET /", ["POST"]), "invalid_request_error"),
        (errors.conflict("No."), "conflict_error"),
        (errors.too_large(), "request_too_large"),
        (errors.ApiError(429, "No.", code="rate_limit_exceeded"), "rate_limit_error"),
        (errors.internal(), "api_error"),
        (errors.overloaded(5), "overloaded_error"),
    ],
)
def test_every_status_has_a_type(error: errors.ApiError, kind: str) -> None:
    told = anthropic_error(error, "req_1")
    assert told["type"] == "error"
    assert told["request_id"] == "req_1"
    assert told["error"]["type"] == kind
    assert told["error"]["message"] == error.message


def test_a_spent_budget_is_told_from_a_rate() -> None:
    spent = anthropic_error(errors.ApiError(429, "No.", code="insufficient_quota"), "req_1")
    assert spent["error"]["details"] == {"error_code": "enforced_spend_limit_reached"}


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for() -> None:
    counted = context_exceeded(100, 120, 5, "messages")
    assert anthropic_error(counted, "req_1")["error"]["message"] == "prompt is too long: 120 tokens > 99 maximum"
    assert "maximum context length is 100 tokens" in counted.message
    unknown = errors.invalid("It does not fit.", None, "context_length_exceeded")
    assert anthropic_error(unknown, "req_1")["error"]["message"] == "prompt is too long: It does not fit."


def test_the_answer_keeps_status_and_headers() -> None:
    request = make_mocked_request("POST", "/v1/messages")
    request[RECORD] = RequestRecord("req_1", "POST")
    response = refusal(request, errors.overloaded(1500))
    assert response.status == 503
    assert response.headers["retry-after-ms"] == "1500"
    assert _body(response)["request_id"] == "req_1"
    assert "param" in _body(refusal(make_mocked_request("POST", "/v1/messages"), errors.internal()))["error"]


def _body(response: web.Response) -> dict[str, Any]:
    assert isinstance(response.body, bytes)
    return msgspec.json.decode(response.body)
