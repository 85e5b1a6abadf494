"""The breaker of an upstream: it opens, waits longer each time, and lets one request try."""

from __future__ import annotations

import pytest

from gateway.base.upstream_source import UpstreamModel, UpstreamSource
from gateway.upstreams.breaker import FIRST_WAIT_S, LONGEST_WAIT_S, MOST_FAILURES, Breaker
from gateway.upstreams.outcomes import Fault, client_error, of_status, retry_after_s
from gateway.upstreams.place import Place
from gateway.upstreams.wires.values import Upstream


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(MOST_FAILURES):
        breaker.failed(now, "connect")
    return breaker


def test_it_opens_after_failures_in_a_row_alone():
    breaker = Breaker()
    for _ in range(MOST_FAILURES - 1):
        breaker.failed(0.0, "connect")
    breaker.succeeded()
    breaker.failed(0.0, "connect")
    assert breaker.state(0.0) == "closed"
    assert opened().state(0.0) == "open"
    assert not opened().lets_through(FIRST_WAIT_S - 0.1)


def test_one_request_tries_and_decides():
    breaker = opened()
    assert breaker.state(FIRST_WAIT_S) == "half_open"
    breaker.sent(FIRST_WAIT_S)
    assert not breaker.lets_through(FIRST_WAIT_S), "one tries already"
    breaker.failed(FIRST_WAIT_S, "connect")
    assert not breaker.lets_through(FIRST_WAIT_S + 2 * FIRST_WAIT_S - 0.1)
    breaker.sent(FIRST_WAIT_S * 3)
    breaker.succeeded()
    assert breaker.state(FIRST_WAIT_S * 3) == "closed"


def test_a_client_that_leaves_decides_nothing():
    breaker = opened()
    breaker.sent(FIRST_WAIT_S)
    breaker.undecided()
    assert breaker.lets_through(FIRST_WAIT_S)


def test_the_wait_is_bounded():
    breaker = opened()
    for _ in range(40):
        breaker.failed(0.0, "connect")
    assert breaker.wait_s(0.0) == LONGEST_WAIT_S


def test_a_refused_credential_opens_at_once_and_a_rate_limit_only_waits():
    breaker = Breaker()
    breaker.failed(0.0, "credential", at_once=True)
    assert breaker.state(0.0) == "open"
    breaker = Breaker()
    breaker.told_to_wait(0.0, 20.0)
    assert (breaker.state(0.0), breaker.lets_through(19.0), breaker.lets_through(20.0)) == ("closed", False, True)


def place() -> Place:
    models = {"good": UpstreamModel(), "bad": UpstreamModel()}
    return Place(Upstream("mock", UpstreamSource(url="http://127.0.0.1:1/v1", models=models)), clock=lambda: 0.0)


NO_ACCESS = b'{"error": {"message": "Project `p` does not have access to model `m`", "code": "model_not_found"}}'
FLAGGED = b'{"error": {"code": 403, "message": "The model requires moderation and your input was flagged"}}'


@pytest.mark.parametrize(
    "fault", [of_status(404, {}, b""), of_status(403, {}, NO_ACCESS), of_status(500, {}, b""), Fault("garbage")]
)
def test_attack_D17_a_model_that_fails_keeps_nobody_from_the_others(fault):
    """A tenant that asked for a model that the provider does not know closed the upstream for everybody."""
    one = place()
    for _ in range(MOST_FAILURES):
        one.begin("bad")
        one.failed("bad", fault)
        one.end()
    assert (one.takes_work("bad"), one.takes_work("good")) == (False, True)
    assert (one.wait_s("bad") > 0, one.wait_s("good"), one.state) == (True, 0.0, "open")
    one.begin("good")
    one.delivered("good", 0.1)
    assert not one.takes_work("bad"), "the answer of another model says nothing of it"


@pytest.mark.parametrize("fault", [Fault("connect", "address"), of_status(401, {}, b""), of_status(429, {}, b"")])
def test_what_is_wrong_with_the_address_or_the_credential_holds_for_all_models(fault):
    one = place()
    for _ in range(MOST_FAILURES):
        one.begin("a")
        one.failed("a", fault)
        one.end()
    assert (one.takes_work("a"), one.takes_work("b")) == (False, False)
    assert one.wait_s("b") > 0


@pytest.mark.parametrize(
    ("status", "blame", "shown"),
    [
        (302, "model", 503),
        (400, "client", 400),
        (401, "credential", 503),
        (403, "credential", 503),
        (404, "no_model", 503),
        (413, "client", 400),
        (429, "rate", 503),
        (500, "model", 503),
        (529, "model", 503),
        (204, "model", 503),
    ],
)
def test_each_status_has_one_outcome(status, blame, shown):
    fault = of_status(status, {}, b'{"error": {"message": "sk-secret at http://10.0.0.1"}}')
    error = client_error(fault)
    assert (fault.blame, error.status) == (blame, shown)
    assert "secret" not in error.message
    assert "10.0.0.1" not in error.message


@pytest.mark.parametrize(
    ("status", "body", "blame", "code"),
    [
        (403, FLAGGED, "client", "content_filter"),
        (403, NO_ACCESS, "no_model", "upstream_unavailable"),
        (403, b'{"error": {"message": "Your account has been flagged"}}', "credential", "upstream_unavailable"),
        (401, FLAGGED, "credential", "upstream_unavailable"),
    ],
)
def test_a_403_for_an_input_or_a_model_says_nothing_of_the_credential(status, body, blame, code):
    """One input that a moderation flagged closed the upstream to everybody."""
    fault = of_status(status, {}, body)
    assert (fault.blame, client_error(fault).code) == (blame, code)


def test_a_prompt_that_is_too_long_has_the_code_that_clients_know():
    body = b'{"error": {"message": "This model\'s maximum context length is 8192 tokens"}}'
    error = client_error(of_status(400, {}, body))
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 1),
        ({"retry-after": "7"}, 7),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "soon"}, 1),
        ({"retry-after": "-3"}, 1),
        ({"retry-after": "nan"}, 1),
    ],
)
def test_a_time_to_wait_is_read_or_is_a_second(headers, seconds):
    assert retry_after_s(headers) == seconds
