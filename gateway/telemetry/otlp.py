"""Planned spans as the body of OTLP/HTTP, and the POST that takes it to a collector.

The body is protobuf's wire format, written straight from the plan (protobuf.dev/programming-guides/encoding; fields of
opentelemetry-proto's trace.proto, common.proto and resource.proto). Making protobuf's own messages first takes three
times as long and 10 MB of memory. A test reads the bodies with protobuf and compares them with those of the SDK.
"""

from __future__ import annotations

import email.utils
import gzip
import logging
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import requests
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
_PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


# --- protobuf's wire format ---


def _varint(number: int) -> bytes:
    """Returns an integer of 64 bits, seven bits a byte; a negative one as its two's complement."""
    number &= 2**64 - 1
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


_VARINTS = tuple(_varint(number) for number in range(1024))


def _number(number: int) -> bytes:
    """Returns what `_varint` returns, without making it where it is a usual length, step or count."""
    return _VARINTS[number] if 0 <= number < 1024 else _varint(number)


def _tag(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _field(tag: bytes, body: bytes) -> bytes:
    """Returns a field of bytes or of a message, with its length."""
    return tag + _number(len(body)) + body


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode(errors="replace"))


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""The kinds of fields."""
_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack
_fixed32 = struct.Struct("<I").pack

# --- OTLP's messages ---

_IS_TEXT, _IS_BOOL, _IS_INT = _tag(1, _BYTES), _tag(2, _VARINT), _tag(3, _VARINT)
_IS_DOUBLE, _IS_LIST, _ITEM = _tag(4, _FIXED64), _tag(5, _BYTES), _tag(1, _BYTES)
_KEY, _VALUE = _tag(1, _BYTES), _tag(2, _BYTES)
_TRACE_ID, _SPAN_ID, _PARENT_ID = _tag(1, _BYTES) + b"\x10", _tag(2, _BYTES) + b"\x08", _tag(4, _BYTES) + b"\x08"
"""All ids of a kind have one length, which stands here already."""
_NAME, _START, _END = _tag(5, _BYTES), _tag(7, _FIXED64), _tag(8, _FIXED64)
_ATTRIBUTES, _EVENTS, _LINKS, _FLAGS = _tag(9, _BYTES), _tag(11, _BYTES), _tag(13, _BYTES), _tag(16, _FIXED32)
_KINDS = {name: _tag(6, _VARINT) + _varint(kind) for name, kind in (("internal", 1), ("server", 2), ("client", 3))}
_UNSET, _ERROR = _field(_tag(15, _BYTES), b""), _field(_tag(15, _BYTES), _tag(3, _VARINT) + _varint(2))
_EVENT_TIME, _EVENT_NAME, _EVENT_ATTRIBUTES = _tag(1, _FIXED64), _tag(2, _BYTES), _tag(3, _BYTES)
_LINK_FLAGS = _tag(6, _FIXED32)
_KNOWS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_FIRST, _SECOND = _tag(1, _BYTES), _tag(2, _BYTES)


def encoded(spans: Sequence[MadeSpan], resource: Mapping[str, Any], scope: str) -> bytes:
    """Returns the body of one export."""
    told = _field(_FIRST, _attributes(_FIRST, resource))
    named = _field(_FIRST, _text(_FIRST, scope))
    of_scope = named + b"".join([_field(_SECOND, _span(one)) for one in spans])
    return _field(_FIRST, told + _field(_SECOND, of_scope))


def _span(made: MadeSpan) -> bytes:
    planned = made.planned
    parts = [_TRACE_ID, made.trace_id.to_bytes(16, "big"), _SPAN_ID, made.span_id.to_bytes(8, "big")]
    if made.parent_id:
        parts += (_PARENT_ID, made.parent_id.to_bytes(8, "big"))
    parts += (_text(_NAME, planned.name), _KINDS[planned.kind])
    parts += (_START, _fixed64(planned.start_ns), _END, _fixed64(planned.end_ns))
    parts.append(_attributes(_ATTRIBUTES, made.attributes))
    for name, at_ns, given in planned.events:
        event = _EVENT_TIME + _fixed64(at_ns) + _text(_EVENT_NAME, name) + _attributes(_EVENT_ATTRIBUTES, given)
        parts.append(_field(_EVENTS, event))
    parts += [_field(_LINKS, _link(link)) for link in made.links]
    parts += (_ERROR if planned.error else _UNSET, _FLAGS, _flags(made.is_parent_remote))
    return b"".join(parts)


def _link(context: SpanContext) -> bytes:
    ids = _TRACE_ID + context.trace_id.to_bytes(16, "big") + _SPAN_ID + context.span_id.to_bytes(8, "big")
    return ids + _LINK_FLAGS + _flags(context.is_remote)


def _flags(is_remote: bool) -> bytes:
    return _fixed32(_KNOWS_IS_REMOTE | (_IS_REMOTE if is_remote else 0))


def _attributes(tag: bytes, values: Mapping[str, Any]) -> bytes:
    return b"".join(
        [
            _known_attribute(tag, name, value) if type(value) in _REPEATED else _attribute(tag, name, value)
            for name, value in values.items()
        ]
    )


def _attribute(tag: bytes, name: str, value: Any) -> bytes:
    return _field(tag, _text(_KEY, name) + _field(_VALUE, _value(value)))


_REPEATED = frozenset((str, int, bool))
"""Most attributes of these kinds have a value that other spans had, such as a model or a number of tokens."""
_known_attribute = lru_cache(maxsize=1024, typed=True)(_attribute)


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return _text(_IS_TEXT, value)
    if isinstance(value, bool):
        return _IS_BOOL + _number(value)
    if isinstance(value, int):
        return _IS_INT + _number(value)
    if isinstance(value, float):
        return _IS_DOUBLE + _double(value)
    return _field(_IS_LIST, b"".join([_field(_ITEM, _value(one)) for one in value]))


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
