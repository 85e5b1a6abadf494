"""The status that logs and metrics have of a request whose handler failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from aiohttp import ClientConnectionResetError, web
from aiohttp.test_utils import make_mocked_request

from gateway.http.middleware import observe
from gateway.telemetry.keys import OBSERVERS, RECORD, TRACING
from gateway.telemetry.observers import Observers
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.tracing import Tracing
from workers.process.logs import HANDLED


@pytest.mark.parametrize(("phase", "status"), [("decode", 499), ("", 500)])
async def test_a_write_to_a_client_that_left_is_no_error_of_ours(phase: str, status: int) -> None:
    """Beside a flood eight streams whose clients had gone were logged with status 500."""
    app, seen = web.Application(), list[RequestRecord]()
    app[TRACING], app[OBSERVERS] = Tracing(0.0, (), None), Observers()
    app[OBSERVERS].of_each(seen.append)

    async def handler(request: web.Request) -> web.StreamResponse:
        request[RECORD].disconnect_phase = phase
        raise ClientConnectionResetError("Cannot write to closing transport")

    with pytest.raises(ClientConnectionResetError):
        await observe(make_mocked_request("POST", "/v1/completions", app=app), handler)
    await asyncio.sleep(0)
    assert [record.status for record in seen] == [status]


async def test_requests_that_end_in_one_turn_are_shown_together_and_no_fault_of_an_observer_hides_one() -> None:
    observers, together, each = Observers(), list[int](), list[str]()

    def failing(record: RequestRecord) -> None:
        if record.request_id == "req_1":
            raise ValueError
        each.append(record.request_id)

    def broken(records: Sequence[RequestRecord]) -> None:
        raise ValueError

    observers.add(broken)
    observers.add(lambda records: together.append(len(records)))
    observers.of_each(failing)
    settling = asyncio.create_task(asyncio.sleep(0.01))
    for number in range(4):
        record = RequestRecord(f"req_{number}", "POST")
        record.settling = settling if number == 3 else None
        observers.publish(record)
    assert not together
    await asyncio.sleep(0)
    assert (together, each) == ([3], ["req_0", "req_2"])
    await settling
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (together, each) == ([3, 1], ["req_0", "req_2", "req_3"])


async def test_the_observers_of_many_requests_run_with_the_ids_of_none() -> None:
    observers, handled = Observers(), list[object]()
    observers.add(lambda _: handled.append(HANDLED.get()))

    async def end() -> None:
        record = RequestRecord("req_1", "POST")
        HANDLED.set(record)
        observers.publish(record)

    await asyncio.create_task(end())
    await asyncio.sleep(0)
    assert handled == [None]
