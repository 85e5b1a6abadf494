"""One request: where its time went, what of its prompt was cached, why it cost what it did, and how to send it again."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from aiohttp import hdrs, web

from gateway.console import charts, choices, navigation, pages
from gateway.console.screens.traffic.requests import was_computed
from gateway.console.tables import Column, Table, money_column
from gateway.console.viewer import Viewer

MISSES = {
    "opt_out": "the tenant or the request does not read the cache",
    "last_token": "all of it was cached; the last token is always computed",
    "below_block": "what was left is shorter than a block of the cache",
    "restore_skipped": "fetching the rest back would have taken longer than computing it",
    "pin_expired": "it was kept for a time that is over",
    "evicted": "it was cached, and has made room for others since",
    "version": "the model's weights have changed since",
    "diverged": "the text changes here: everything after the change has to be computed",
    "cold": "nothing like it was sent before",
    "other_worker": "another worker has it",
}
PARTS = {
    "cache_read": "Prompt, read from the cache",
    "cache_write": "Prompt, written to the cache",
    "uncached": "Prompt, not cached",
    "output": "Output",
    "other_prompts": "Further prompts of the request",
}
_PHASES = (
    Column("name", "Phase"),
    Column("start_ms", "Start", "ms"),
    Column("end_ms", "End", "ms"),
    Column("num_tokens", "Tokens", "count"),
    Column("is_critical", "Critical path"),
)
_EVENTS = (
    Column("at_ms", "At", "ms"),
    Column("source", "Told by"),
    Column("name", "Event"),
    Column("step", "Step of the worker", "count"),
    Column("num_tokens", "Tokens", "count"),
)
_PRICE = (
    Column("part", "Part"),
    Column("quantity", "Tokens", "count"),
    money_column("rate_micro_units_per_million", "Price of a million"),
    money_column("amount_micro_units", "Amount"),
)


async def show_request(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.get(f"{viewer.own('requests')}/{pages.part(request, 'id')}")
    period = time.strftime("%Y-%m", time.gmtime(found["created_at"]))
    waterfall = charts.waterfall(found["timeline"]["phases"], found["duration_ms"])
    tables = {
        "phases": Table("phases", _PHASES, [_phase(one) for one in waterfall], ""),
        "events": Table(
            "events", _EVENTS, sorted(found["timeline"]["events"], key=lambda one: one["at_ms"]), _NO_EVENTS
        ),
        "price": Table("price", _PRICE, _price_rows(found["price"]), _no_price(found)),
    }
    return pages.show(
        request,
        viewer,
        "request.html",
        table=tables.get(request.query.get("table", "")),
        found=found,
        waterfall=waterfall,
        ticks=charts.time_ticks(found["timeline"]["phases"], found["duration_ms"]),
        events=tables["events"],
        price=tables["price"],
        prompt=_prompt(found["usage"]) if was_computed(found) else None,
        miss=MISSES.get(found["cache"]["miss_reason"] or "", found["cache"]["miss_reason"]),
        period=period,
        has=navigation.has_screen,
        tenant_page=choices.tenant_page(found),
        session=session_address(found["session_id"], found["project_id"] if viewer.sees_all else None),
        curl=_curl(found),
    )


async def show_spans(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Downloads the request as OTLP/JSON."""
    request_id = pages.part(request, "id")
    answer = await viewer.get(f"{viewer.own('requests')}/{request_id}/otlp")
    name = f'attachment; filename="headgate-{request_id}.otlp.json"'
    return web.json_response(answer, headers={hdrs.CONTENT_DISPOSITION: name})


_NO_EVENTS = "Nothing is known of this request: it was refused before it began."

_SAID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/rerank": {"query": "Hello", "documents": ["Hello"]},
    "/v1/score": {"text_1": "Hello", "text_2": "Hello"},
}
"""Map from the path of a request to what stands for its content, which is not kept."""


def session_address(session_id: str | None, project_id: str | None) -> str | None:
    """Returns the page of a conversation. Its name is free text, so it stands in the query and not in the path."""
    query = {"session": session_id} | ({"project_id": project_id} if project_id else {})
    return f"{pages.ROOT}/sessions/show?{urlencode(query)}" if session_id else None


def _no_price(found: Mapping[str, Any]) -> str:
    if found["status"] >= 400:
        return "A refused request costs nothing."
    return "The ledger has no charge for this request. A charge is there some seconds after the request's end."


def _phase(one: charts.Interval) -> dict[str, Any]:
    return {
        "name": one.name,
        "start_ms": one.start_ms,
        "end_ms": one.end_ms,
        "num_tokens": one.num_tokens or None,
        "is_critical": "yes" if one.is_critical else "",
    }


def _price_rows(price: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if price is None:
        return []
    currency = {"currency": price["currency"]}
    total = {"part": "Charge", "quantity": None, "rate_micro_units_per_million": None}
    return [
        *({**part, **currency, "part": PARTS.get(part["part"], part["part"])} for part in price["parts"]),
        {**total, **currency, "amount_micro_units": price["charge_micro_units"]},
    ]


def _prompt(usage: Mapping[str, int]) -> Sequence[charts.Slice]:
    cached, written = usage["cached_tokens"], usage["cache_write_tokens"]
    computed = max(0, usage["prompt_tokens"] - cached - written)
    return charts.line_of([("from the cache", cached), ("computed and kept", written), ("computed", computed)])


def _curl(found: Mapping[str, Any]) -> str:
    """Returns a command that sends a request like this one. Its text is not known, so a greeting stands in for it."""
    method, _, path = found["endpoint"].partition(" ")
    command = f'curl -X {method} "$HEADGATE_URL{path}" -H "authorization: Bearer $HEADGATE_API_KEY"'
    if method != "POST" or not found["model"]:
        return command
    said = _SAID.get(path, {"messages": [{"role": "user", "content": "Hello"}]})
    body = {"model": found["model"], **said, **({"stream": True} if found["stream"] else {})}
    return f"{command} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


ROUTES = [pages.get("/requests/{id}", show_request), pages.get("/requests/{id}/otlp", show_spans)]
