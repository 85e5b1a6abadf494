"""An estimate of a batch before it is submitted: its lines are checked as the jobs process would, and counted as the
gateway would, within bounds of time and lines.

The work is done in the threads for text, a piece or a line at a time, in the tenant's turn. So an estimate of the
largest file waits behind others' requests, and they never behind more than one of its pieces.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from accounting.batches import batch_runs, batches
from accounting.batches.files import FileInfo
from accounting.batches.order import predicted_tokens, prefix_bytes
from accounting.batches.past_batches import PastBatches, past_batches
from accounting.batches.source import InputUnreadable, opened
from accounting.batches.validate import Fault
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values import clock
from accounting.values.types import Price
from gateway.base import errors, ids
from gateway.base.app_keys import FILES, SETTINGS
from gateway.estimates import outlook, sums
from gateway.estimates.input_lines import MAX_SHOWN, PIECE_BYTES, InputLines
from gateway.estimates.outlook import Reason
from gateway.estimates.sums import Counted, Likely, Whole
from gateway.generation import quotes
from gateway.generation.engine_request import EngineRequest
from gateway.generation.quotes import Part
from gateway.generation.reply import AnswerPlan
from gateway.generation.stream import GENERATION
from gateway.generation.vectors import VectorPlan
from gateway.http import sql
from gateway.http.auth import PRINCIPAL
from gateway.http.body import NUM_BODY_BYTES
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.intake.text_work import SMALL_BYTES, TEXT_WORK
from gateway.schema.batches import EstimateFields
from gateway.telemetry.keys import RECORD
from gateway.telemetry.record import RequestRecord

COUNTING_S = 20.0
"""The time after which no further line is counted."""
NUM_ASKED, ASKED_TOKENS = 16, 200_000
"""The first lines and their tokens of which a worker is asked what it has cached."""

Planner = Callable[[web.Request, dict[str, Any], tuple[str, int] | None], Awaitable[AnswerPlan | VectorPlan]]


@dataclass
class Counting:
    """One estimate on its way."""

    request: web.Request
    endpoint: str
    planner: Planner
    lines: InputLines
    sums: Counted = field(default_factory=Counted)
    price: Price | None = None
    model: str = ""
    """The name under which the batch is billed."""
    parts: list[Part] = field(default_factory=list)

    async def check(self) -> None:
        """Checks all lines, piece by piece."""
        work, tenant = self.request.app[TEXT_WORK], self.request[PRINCIPAL].tenant_id
        while await work.run(tenant, PIECE_BYTES, self.lines.check):
            pass

    async def count(self, most_lines: int) -> None:
        """Counts lines until all, or `most_lines`, are counted, or the time is over. Raises `ApiError`."""
        deadline = time.monotonic() + COUNTING_S
        for index in sums.spread(self.lines.num_good):
            if self.sums.num_lines >= most_lines or (self.sums.num_lines and time.monotonic() > deadline):
                return
            self.sums.num_lines += 1
            self.sums.num_bytes += self.lines.sizes[index]
            try:
                orders, waiting = await self._orders(index)
            except errors.ApiError as error:
                if error.status >= 500 or error.status == 429:
                    raise
                self._refuse(index, error)
            else:
                await self._add(orders, waiting)

    async def _orders(self, index: int) -> tuple[list[EngineRequest], int]:
        """Returns what the engine would get of a line, and its tokens as the bound on waiting tokens counts them."""
        request = self.request
        num_bytes = max(self.lines.sizes[index], SMALL_BYTES + 1)
        body, waiting = await request.app[TEXT_WORK].run(
            request[PRINCIPAL].tenant_id, num_bytes, partial(_read, self.lines, index)
        )
        line = _line_request(request, self.endpoint, num_bytes)
        return list((await self.planner(line, body, ("", self.lines.numbers[index]))).orders), waiting

    async def _add(self, orders: list[EngineRequest], waiting: int) -> None:
        model = orders[0].model
        if orders[0].is_bought:
            raise errors.invalid(
                "There are no estimates for this model: its provider counts the tokens.",
                "input_file_id",
                "unsupported_parameter",
            )
        if self.price is None:
            self.model = model.id
            admission = self.request.app[GENERATION].admission
            self.price = await admission.price(self.request[PRINCIPAL].tenant_id, model.id, "batch", base=model.base)
        self.sums.add(orders, self.price.rates)
        self.sums.predicted_tokens += waiting
        parts = [part for order in orders for part in quotes.parts_of(order)]
        known = sum(len(part.tokens) for part in self.parts + parts)
        if self.sums.num_lines <= NUM_ASKED and known <= ASKED_TOKENS:
            self.parts += parts

    def _refuse(self, index: int, error: errors.ApiError) -> None:
        self.sums.num_refused += 1
        if len(self.sums.refusals) < MAX_SHOWN:
            shown = {"code": error.code or error.type, "message": error.message, "param": error.param}
            self.sums.refusals.append(shown | {"line": self.lines.numbers[index]})


async def estimate(request: web.Request, fields: EstimateFields, planner: Planner) -> dict[str, Any]:
    """Returns the estimate's object. Raises `ApiError`."""
    principal, now = request[PRINCIPAL], int(time.time())
    async with sql.reading(request) as conn:
        source = await batches.check_input(
            conn, principal.tenant_id, fields.input_file_id, fields.endpoint, fields.completion_window, now
        )
        priced = await prices.priced_models(conn, principal.tenant_id, clock.now_ms())
        models = await batch_runs.usable_models(conn, principal.tenant_id, principal.key_id, priced)
    with _reading(request, source, await request.app[DATA_KEYS].key(principal.tenant_id), fields, models) as lines:
        one = Counting(request, fields.endpoint, planner, lines)
        await one.check()
        if lines.whole is None:
            await one.count(fields.headgate.max_counted_lines)
    whole = Whole.of(one.sums, lines.num_good, lines.num_bytes)
    async with sql.reading(request) as conn:
        past = await past_batches(conn, principal.tenant_id, fields.endpoint, lines.model or "", now)
        limits = await tenants.model_limits(conn, principal.tenant_id)
        waiting = await batch_runs.backlog_tokens(conn, principal.tenant_id, lines.model or "")
        backlogs = await batch_runs.backlogs(conn, lines.model or "")
        weights = await tenants.weights_of(conn, {principal.tenant_id, *backlogs})
    own = waiting + whole.predicted_tokens
    ahead = waiting + sums.turns_of_others(principal.tenant_id, own, backlogs, weights)
    most_waiting = limits[lines.model].batch_backlog_tokens if lines.model in limits else None
    would = [] if one.price is None else await _of_limits(one, whole)
    would += _of_file(one, fields, most_waiting is not None and waiting + whole.predicted_tokens > most_waiting)
    expected = None if one.price is None else sums.likely(whole, past, one.price.rates)
    cached = await _cached_share(one) if expected is None else expected.usage.cache_read / expected.usage.prompt
    return _shown(one, fields, whole, past, expected, cached) | {
        "outlook": outlook.worst(would),
        "reasons": [what for _, what in would],
        "expected_finish_at": _finish(expected, past, ahead, now),
    }


@contextmanager
def _reading(
    request: web.Request, source: FileInfo, data_key: bytes, fields: EstimateFields, models: frozenset[str]
) -> Iterator[InputLines]:
    try:
        with opened(request.app[FILES], source, data_key) as reader:
            yield InputLines(reader, fields.endpoint, models, request.app[SETTINGS].json_body_bytes)
    except InputUnreadable:
        raise errors.unavailable("input_file_unreadable", "The input file cannot be read now.") from None


def _read(lines: InputLines, index: int) -> tuple[dict[str, Any], int]:
    body = lines.body(index)
    return body, predicted_tokens(prefix_bytes(body))


def _line_request(request: web.Request, endpoint: str, num_bytes: int) -> web.Request:
    """Returns what a handler sees of one line: a batch's request with a record of its own. Its number of bytes is so
    large that nothing is done on the loop.
    """
    line = request.clone()
    line[RECORD] = RequestRecord(ids.request_id(), "POST", route=endpoint)
    line[PRINCIPAL] = msgspec.structs.replace(request[PRINCIPAL], kind="batch")
    line[NUM_BODY_BYTES] = num_bytes
    return line


async def _of_limits(one: Counting, whole: Whole) -> list[Reason]:
    engine, principal = one.request.app[GENERATION], one.request[PRINCIPAL]
    found = [outlook.of_spend_limit()] if engine.spending.reached else []
    limiter = engine.admission.limiter
    return [*found, *await outlook.of_budgets(limiter, principal, one.model, whole, clock.now_ms())]


def _of_file(one: Counting, fields: EstimateFields, is_beyond_backlog: bool) -> list[Reason]:
    """Returns why the batch, or each of its lines, would fail."""
    lines = one.lines
    faults = [lines.whole] if lines.whole is not None else []
    if not faults and lines.num_invalid and fields.headgate.invalid_lines == "reject":
        faults = lines.faults[:1]
    if not faults and is_beyond_backlog:
        faults = [Fault("backlog_exceeded", None)]
    found = [outlook.of_file(fault.code, fault.shown()["message"]) for fault in faults]
    if 0 < one.sums.num_lines == one.sums.num_refused:
        found.append(outlook.of_file("all_lines_refused", "Each line that was counted would fail: see errors."))
    return found


async def _cached_share(one: Counting) -> float | None:
    """Returns which share of the first lines a worker has cached now; None if no worker answers."""
    if not one.parts:
        return None
    try:
        cached = await quotes.ask_worker(one.request, one.parts)
    except errors.ApiError:
        return None
    return sum(cached.num_tokens) / max(1, sum(len(part.tokens) for part in one.parts))


def _finish(expected: Likely | None, past: PastBatches, ahead: int, now: int) -> int | None:
    """Returns when the batch ends if it and the `ahead` prompt tokens before it run as fast as past batches did."""
    if expected is None:
        return None
    return now + expected.running_s + round(ahead * past.running_s / past.usage.prompt)


def _shown(
    one: Counting,
    fields: EstimateFields,
    whole: Whole,
    past: PastBatches,
    expected: Likely | None,
    cached_share: float | None,
) -> dict[str, Any]:
    lines, counted, price = one.lines, one.sums, one.price
    faults = [fault.shown() for fault in ([lines.whole] if lines.whole is not None else lines.faults)]
    refusals = sorted(counted.refusals, key=lambda shown: int(shown["line"]))
    return {
        "object": "batch.estimate",
        "input_file_id": fields.input_file_id,
        "endpoint": fields.endpoint,
        "model": lines.model,
        "num_lines": lines.num_lines,
        "num_invalid_lines": lines.num_invalid,
        "num_counted_lines": counted.num_lines,
        "num_refused_lines": counted.num_refused,
        "is_sampled": counted.num_lines < lines.num_good,
        "errors": {"object": "list", "data": (faults + refusals)[:MAX_SHOWN]},
        "num_prompt_tokens": whole.prompt_tokens,
        "max_output_tokens": whole.output_tokens,
        "cached_share": None if cached_share is None else round(cached_share, 4),
        "expected_output_tokens": None if expected is None else expected.usage.output,
        "least_charge_micro_units": whole.least,
        "likely_charge_micro_units": None if expected is None else expected.charge,
        "max_charge_micro_units": whole.most,
        "currency": None if price is None else price.currency,
        "price_version": None if price is None else price.version,
        "basis": {"num_batches": past.num_batches, "num_lines": past.num_lines} if past.num_batches else None,
    }
