"""The pages of batches: one is submitted, followed, cancelled and read, by its own tenant alone."""

from __future__ import annotations

import csv
import io
import json

import pytest
from console_pages import signed_in
from gateways import MODEL, PEPPER, RunningGateway
from sqlalchemy import insert

from accounting.access import api_keys
from accounting.batches.batch_lines import LineEnd, add_ended_lines
from accounting.database import sealing
from accounting.requests.idempotency_store import line_key
from accounting.tables.batch_models import BatchLine
from gateway.base.app_keys import DATABASE
from gateway.idempotency.data_keys import DATA_KEYS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBE = "<script>alert(1)</script>\"'"
SCOPES = ["chat", "batch", "files:read", "files:write"]


def line(number: int) -> str:
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": f"\N{SNOWMAN} {number}"}]}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})


LINES = "\r\n".join(line(number) for number in range(3))
FORM = {"endpoint": "/v1/chat/completions", "lines": LINES}


async def test_a_batch_is_submitted_followed_and_cancelled(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("batching", SCOPES)
    async with signed_in(shared_gateway, key) as tenant:
        assert "There is no batch yet" in (await tenant.get("/batches")).words
        assert "No batch is in this state." in (await tenant.get("/batches?state=running")).words
        await tenant.get("/batches")
        page = await tenant.submit("/batches", **FORM)
        assert (page.status, page.path.startswith("/console/batches/batch_")) == (200, True)
        path = page.path.removeprefix("/console")
        assert 'data-reload="3000"' in page.text
        assert "Status validating" in page.words
        sent = await tenant.get(f"{path}/files/input_file_id")
        assert sent.text.strip().splitlines() == LINES.splitlines()
        assert sent.headers["content-disposition"].startswith("attachment")
        assert (await tenant.get(f"{path}/files/output_file_id")).status == 404
        assert (await tenant.get(f"{path}/files/endpoint")).status == 404
        [listed] = csv.DictReader(io.StringIO((await tenant.get("/batches?format=csv")).text))
        assert (listed["id"], listed["charge_micro_units"], listed["currency"]) == (path[9:], "0", "USD")
        assert "Cost so far 0.000000 USD" in (await tenant.get(path)).words
        await tenant.get(path)
        page = await tenant.submit(f"{path}/cancel")
        assert "Status cancelling" in page.words
        assert "Cancel this batch" not in page.words


async def test_a_refused_form_keeps_its_values(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        await tenant.get("/batches")
        page = await tenant.submit("/batches", lines=PROBE, endpoint="/v1/rerank", skip="1")
        assert "A batch's endpoint is one of" in page.words
        assert ("<script>alert" in page.text, PROBE in page.words, "checked" in page.text) == (False, True, True)


async def test_an_estimate_is_shown_and_submits_nothing(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("estimating", SCOPES)
    async with signed_in(shared_gateway, key) as tenant:
        await tenant.get("/batches")
        page = await tenant.submit("/batches", **FORM | {"lines": LINES + "\n{"}, skip="1", action="estimate")
        assert "4 lines, 1 invalid, 0 refused" in page.words
        assert "The batch would run now." in page.words
        assert "Line 4: This line is not parseable" in page.words
        assert "There is no batch yet" in page.words
        async with shared_gateway.session(key) as session, session.get("/v1/files") as answer:
            assert (await answer.json())["data"] == []


async def test_another_tenants_batch_is_neither_seen_nor_cancelled(shared_gateway: RunningGateway) -> None:
    _, mine = await shared_gateway.new_tenant("mine", SCOPES)
    _, other = await shared_gateway.new_tenant("other", SCOPES)
    async with signed_in(shared_gateway, mine) as tenant, signed_in(shared_gateway, other) as stranger:
        await tenant.get("/batches")
        path = (await tenant.submit("/batches", **FORM)).path.removeprefix("/console")
        await stranger.get("/batches")
        for page in (
            await stranger.get(path),
            await stranger.get(f"{path}/files/input_file_id"),
            await stranger.submit(f"{path}/cancel", form_token=(await stranger.get("/batches")).form_token),
        ):
            assert page.status == 404
        assert "Status validating" in (await tenant.get(path)).words


async def test_what_is_wrong_with_the_input_is_inert_text(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("careless", SCOPES)
    async with signed_in(shared_gateway, key) as tenant:
        await tenant.get("/batches")
        path = (await tenant.submit("/batches", **FORM)).path.removeprefix("/console")
        faults = json.dumps([{"line": 2, "code": "invalid", "message": PROBE, "param": "=cmd|' /C calc'!A0"}])
        async with shared_gateway.app[DATABASE].write() as conn:
            await conn.exec_driver_sql(
                "UPDATE batch SET state = 'failed', errors = ? WHERE id = ?", (faults, path.rpartition("/")[2])
            )
        page = await tenant.get(path)
        assert ("<script>alert" in page.text, PROBE in page.words) == (False, True)
        assert "data-reload" not in page.text
        export = (await tenant.get(f"{path}?format=csv")).text
        assert ("'=cmd" in export, ",=cmd" in export) == (True, False)


async def test_a_key_that_reads_usage_sees_how_a_batch_goes_and_no_file(shared_gateway: RunningGateway) -> None:
    tenant_id, key = await shared_gateway.new_tenant("read only", SCOPES)
    async with shared_gateway.app[DATABASE].write() as conn:
        reads = await api_keys.create(conn, PEPPER, tenant_id=tenant_id, now=1, scopes=["usage:read"])
    async with signed_in(shared_gateway, key) as tenant, signed_in(shared_gateway, reads.value) as viewer:
        await tenant.get("/batches")
        path = (await tenant.submit("/batches", **FORM)).path.removeprefix("/console")
        page = await viewer.get("/batches")
        assert (path in page.text, "Submit a batch" in page.words) == (True, False)
        page = await viewer.get(path)
        assert ("Status validating" in page.words, "Files" in page.words, "Cancel" in page.words) == (
            True,
            False,
            False,
        )
        for file in ("files/input_file_id", "results"):
            assert (await viewer.get(f"{path}/{file}")).status == 403
    async with shared_gateway.session(reads.value) as session:
        batch_id = path.rpartition("/")[2]
        for method, target in (("POST", f"/v1/batches/{batch_id}/cancel"), ("GET", f"/v1/batches/{batch_id}/results")):
            async with session.request(method, target) as answer:
                assert answer.status == 403, target


async def test_the_operator_sees_and_cancels_a_batch_but_not_its_files(shared_gateway: RunningGateway) -> None:
    project, key = await shared_gateway.new_tenant("watched", SCOPES)
    admin_key = shared_gateway.keys.admin_key
    async with signed_in(shared_gateway, key) as tenant, signed_in(shared_gateway, admin_key) as operator:
        await tenant.get("/batches")
        path = (await tenant.submit("/batches", **FORM)).path.removeprefix("/console")
        listed = await operator.get(f"/batches?state=running&project_id={project}")
        assert (path in listed.text, "Submit a batch" in listed.words) == (True, False)
        page = await operator.get(path)
        assert f"/console/tenants/{project}" in page.text
        assert f"/console/requests?batch_id={path.rpartition('/')[2]}" in page.text
        assert f"{path}/files" not in page.text
        for file in ("files/input_file_id", "results"):
            assert (await operator.get(f"{path}/{file}")).status in {403, 404}
        await operator.get(path)
        assert "Status cancelling" in (await operator.submit(f"{path}/cancel")).words
        assert "Status cancelling" in (await tenant.get(path)).words


async def test_lines_that_ended_are_read_while_the_batch_runs_and_failures_are_counted(
    shared_gateway: RunningGateway,
) -> None:
    project, key = await shared_gateway.new_tenant("impatient", SCOPES)
    _, other = await shared_gateway.new_tenant("curious", SCOPES)
    async with signed_in(shared_gateway, key) as tenant, signed_in(shared_gateway, other) as stranger:
        await tenant.get("/batches")
        path = (await tenant.submit("/batches", **FORM)).path.removeprefix("/console")
        batch_id = path.rpartition("/")[2]
        await end_lines(shared_gateway, project, batch_id)
        page = await tenant.get(path)
        assert "Results until now" in page.words
        assert "errored 400 invalid_value 1" in page.words
        assert "How it ended" in page.words
        export = (await tenant.get(f"{path}?format=csv&table=failures")).text
        assert '"errored",400,"invalid_value",1' in export
        assert '"errored",400,"context_length_exceeded",1' in export  # both were one row of status 400
        found = [json.loads(text) for text in (await tenant.get(f"{path}/results")).text.splitlines()]
        assert [(one["custom_id"], one["response"]["status_code"]) for one in found] == [
            ("0", 200),
            ("2", 400),
            ("3", 400),
        ]
        assert found[0]["response"]["body"] == {"text": "answer 0"}
        assert found[0]["id"] == f"batch_req_{batch_id.removeprefix('batch_')}_1"
        assert (await stranger.get(f"{path}/results")).status == 404


async def end_lines(gateway: RunningGateway, tenant_id: str, batch_id: str) -> None:
    """Lines 1, 3 and 4 of the batch end; line 2 has begun."""
    data_key = await gateway.app[DATA_KEYS].key(tenant_id)
    async with gateway.app[DATABASE].write() as conn:
        await conn.exec_driver_sql("UPDATE batch SET state = 'in_progress', num_total = 4 WHERE id = ?", (batch_id,))
        row = {"batch_id": batch_id, "line_no": 2, "custom_id": "1"}
        await conn.execute(insert(BatchLine).values(row))
        ends = [
            LineEnd(
                line_no=number,
                custom_id=str(number - 1),
                state=state,
                request_id=f"req_{number}",
                status=status,
                body=sealing.seal(data_key, answer, line_key(batch_id, number).encode()),
                error=None if code is None else {"code": code, "message": "no"},
            )
            for number, state, status, answer, code in (
                (1, "succeeded", 200, b'{"text": "answer 0"}', None),
                (3, "errored", 400, b'{"error": {"message": "no"}}', "invalid_value"),
                (4, "errored", 400, b'{"error": {"message": "no"}}', "context_length_exceeded"),
            )
        ]
        await add_ended_lines(conn, batch_id, ends)
