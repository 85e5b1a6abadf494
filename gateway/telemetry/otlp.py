"""Planned spans as OTLP's own messages, and the POST that takes them to a collector.

The SDK's encoder takes four times as long: it reads the SDK's objects through properties and copies, and each of its
attributes is checked again. It loads protobuf, about 10 MB, so only a gateway with a collector imports it.
"""

from __future__ import annotations

import email.utils
import gzip
import logging
import random
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from opentelemetry.trace import SpanContext
from opentelemetry.util.re import parse_env_headers

from gateway.telemetry.made_span import MadeSpan

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "http://localhost:4318"
DEFAULT_TIMEOUT_S = 10.0
MAX_TRIES = 6
RETRYABLE = frozenset({429, 502, 503, 504})
"""The statuses after which OTLP wants the same body to be sent again."""
JITTER = 0.2
_KNOWS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_KINDS = {"internal": 1, "server": 2, "client": 3}
_UNSET, _ERROR = Status(), Status(code=Status.STATUS_CODE_ERROR)
_PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


def encoded(spans: Sequence[MadeSpan], resource: Mapping[str, Any], scope: str) -> bytes:
    """Returns the body of one export."""
    within = ScopeSpans(scope=InstrumentationScope(name=scope), spans=[_span(one) for one in spans])
    whole = ResourceSpans(resource=Resource(attributes=_attributes(resource)), scope_spans=[within])
    body: bytes = ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()
    return body


def _span(made: MadeSpan) -> Span:
    planned, context, parent = made.planned, made.context, made.parent
    return Span(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        parent_span_id=b"" if parent is None else parent.span_id.to_bytes(8, "big"),
        name=planned.name,
        kind=_KINDS[planned.kind],  # type: ignore[arg-type]  # an enum of protobuf is a plain int
        start_time_unix_nano=planned.start_ns,
        end_time_unix_nano=planned.end_ns,
        attributes=_attributes(made.attributes),
        events=[
            Span.Event(name=name, time_unix_nano=at_ns, attributes=_attributes(given))
            for name, at_ns, given in planned.events
        ],
        links=[_link(link) for link in made.links],
        status=_ERROR if planned.error else _UNSET,
        flags=_flags(parent),
    )


def _link(context: SpanContext) -> Span.Link:
    return Span.Link(
        trace_id=context.trace_id.to_bytes(16, "big"), span_id=context.span_id.to_bytes(8, "big"), flags=_flags(context)
    )


def _flags(context: SpanContext | None) -> int:
    return _KNOWS_IS_REMOTE | (_IS_REMOTE if context is not None and context.is_remote else 0)


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in values.items()]


def _value(value: Any) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))


class Collector:
    """The receiver that the standard OTEL_EXPORTER_OTLP_* variables name. Its methods run in the thread that sends."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._endpoint = _endpoint(environ)
        self._timeout_s = _seconds(_setting(environ, "TIMEOUT"))
        compression = _setting(environ, "COMPRESSION").lower()
        self._pack = _PACK.get(compression)
        self._session = requests.Session()
        self._session.headers.update({"content-type": "application/x-protobuf", "user-agent": "headgate"})
        self._session.headers.update(parse_env_headers(_setting(environ, "HEADERS"), liberal=True))
        if self._pack is not None:
            self._session.headers["content-encoding"] = compression
        self._session.verify = _setting(environ, "CERTIFICATE") or True
        certificate, key = _setting(environ, "CLIENT_CERTIFICATE"), _setting(environ, "CLIENT_KEY")
        if certificate:
            self._session.cert = (certificate, key) if key else certificate
        self._is_over = threading.Event()

    def send(self, body: bytes) -> bool:
        """Sends one body, and again while the collector asks for that and there is time. Returns whether it was
        taken.
        """
        packed = body if self._pack is None else self._pack(body)
        until = time.monotonic() + self._timeout_s
        status: int | None = None
        for number in range(MAX_TRIES):
            status, wait_s = self._try(packed, max(0.1, until - time.monotonic()))
            if status is not None and 200 <= status < 400:
                return True
            if status is not None and status not in RETRYABLE:
                logger.error("spans_refused", extra={"status": status})
                return False
            if wait_s is None:
                wait_s = 2**number * random.uniform(1 - JITTER, 1 + JITTER)
            if wait_s > until - time.monotonic() or self._is_over.wait(wait_s):
                break
        logger.error("spans_not_sent", extra={"status": status})
        return False

    def close(self) -> None:
        """Ends waiting between tries, from another thread."""
        self._is_over.set()
        self._session.close()

    def _try(self, packed: bytes, timeout_s: float) -> tuple[int | None, float | None]:
        """Returns the status, None for no answer, and the seconds after which the collector wants to be asked again."""
        try:
            answer = self._session.post(self._endpoint, data=packed, timeout=timeout_s)
        except requests.RequestException:
            return None, None
        return answer.status_code, _retry_after_s(answer.headers.get("retry-after", ""))


def _setting(environ: Mapping[str, str], name: str) -> str:
    """Returns a variable for traces, or else the one for all signals."""
    found = environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}")
    return (found or "").strip()


def _endpoint(environ: Mapping[str, str]) -> str:
    if own := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return own
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT
    return f"{base.removesuffix('/')}/v1/traces"


def _seconds(text: str) -> float:
    try:
        return float(text or DEFAULT_TIMEOUT_S)
    except ValueError:
        logger.warning("timeout_not_read", extra={"value": text})
        return DEFAULT_TIMEOUT_S


def _retry_after_s(text: str) -> float | None:
    """Reads the header Retry-After: a number of seconds or a date."""
    if text.isdecimal():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
        return max(0.0, moment.timestamp() - time.time())
    except (TypeError, ValueError):
        return None
