"""Batches: how far each has come and what it cost so far, its results, and a form that submits one. The operator sees
and cancels those of all tenants; their files it does not see.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.console import charts, choices, pages
from gateway.console.calls import Refused, decoded
from gateway.console.formats import NONE
from gateway.console.tables import Column, Table, money_column, next_page
from gateway.console.viewer import Viewer

PAGE_ROWS = 50
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
FILES = ("input_file_id", "output_file_id", "error_file_id")
_EMPTY = "There is no batch yet. Submit one below: a line of JSON for each request."
_NONE = "No batch was found. Tenants submit them with their own keys."
_EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": '
    '{"model": "MODEL", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}}'
)


async def list_batches(
    request: web.Request,
    viewer: Viewer,
    given: Mapping[str, str] | None = None,
    message: str = "",
    estimate: Mapping[str, Any] | None = None,
) -> web.StreamResponse:
    asked = choices.asked(request, _filters(viewer))
    found = await viewer.listed(viewer.own("batches"), PAGE_ROWS, **asked)
    tenants = await choices.tenants(viewer)
    rows = await choices.named(viewer, map(_row, found["data"]))
    empty = _NONE if viewer.sees_all else "No batch is in this state." if asked else _EMPTY
    return pages.show(
        request,
        viewer,
        "batches.html",
        table=Table("batches", choices.columns_for(viewer, _COLUMNS), rows, empty, next_page(found)),
        tenants=tenants,
        filters=_filters(viewer),
        endpoints=ENDPOINTS,
        given=given or {},
        message=message,
        estimate=estimate,
        may_submit=not viewer.sees_all and viewer.principal.scopes >= {"batch", "files:write"},
        example=_EXAMPLE,
    )


async def show_batch(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    batch = await viewer.get(viewer.own(f"batches/{pages.part(request, 'id')}"))
    counts = batch["request_counts"]
    done, failed = counts["completed"], counts["failed"]
    faults = (batch["errors"] or {}).get("data", [])
    tables = [
        Table("faults", _FAULTS, [{name: fault.get(name) for name in _FAULT_FIELDS} for fault in faults], ""),
        Table("failures", _FAILURES, batch["headgate"].get("failures", []), ""),
    ]
    return pages.show(
        request,
        viewer,
        "batch.html",
        batch=batch,
        lines=charts.line_of(
            [("answered", done), ("failed", failed), ("waiting", max(0, counts["total"] - done - failed))]
        ),
        is_running=batch["status"] in RUNNING,
        may_cancel=viewer.may_change and (viewer.sees_all or "batch" in viewer.principal.scopes),
        reads_files="files:read" in viewer.principal.scopes,
        reads_results="batch" in viewer.principal.scopes,
        eta=_eta(batch["headgate"]["eta_s"]),
        tables=tables,
    )


async def submit(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Uploads the lines as a file and makes a batch of it, or an estimate. A refusal shows the form with its values again."""
    form = await pages.fields_of(request)
    try:
        file = await _upload(viewer, form.get("lines", ""))
        asked = {"input_file_id": file["id"], "endpoint": form.get("endpoint", ""), "completion_window": "24h"}
        options = {"headgate": {"invalid_lines": "skip"}} if form.get("skip") else {}
        if form.get("action") == "estimate":
            return await list_batches(request, viewer, form, "", await _estimate(viewer, file["id"], asked | options))
        batch = await viewer.post("/v1/batches", asked | options)
    except Refused as refused:
        if refused.status == 401:
            raise
        return await list_batches(request, viewer, form, refused.message)
    return pages.see_other(f"/batches/{batch['id']}")


async def _estimate(viewer: Viewer, file_id: str, asked: Mapping[str, Any]) -> Any:
    """Returns the estimate of a file, which is deleted again. Raises `Refused`."""
    try:
        return await viewer.post("/v1/batches/estimate", asked)
    finally:
        await viewer.delete(f"/v1/files/{file_id}")


async def cancel(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    batch_id = pages.part(request, "id")
    await viewer.post(viewer.own(f"batches/{batch_id}/cancel"), {})
    return pages.see_other(f"/batches/{batch_id}")


async def download(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Sends one of the batch's files as the API has it."""
    batch = await viewer.get(f"/v1/batches/{pages.part(request, 'id')}")
    which = request.match_info["which"]
    file_id = batch.get(which) if which in FILES else None
    if not file_id:
        raise Refused(404, "The batch has no such file.")
    return await viewer.download(f"/v1/files/{file_id}/content")


async def results(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Sends what has ended until now, while the batch runs too."""
    return await viewer.download(f"/v1/batches/{pages.part(request, 'id')}/results")


def _filters(viewer: Viewer) -> Sequence[str]:
    return ("project_id", "state") if viewer.sees_all else ("state",)


async def _upload(viewer: Viewer, lines: str) -> Any:
    """Uploads a batch's input. Raises `Refused`."""
    boundary = secrets.token_hex(16)
    data = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="console.jsonl"\r\n'
        f"content-type: application/jsonl\r\n\r\n{lines.replace(chr(13), '')}\n\r\n--{boundary}--\r\n"
    )
    return decoded(
        await viewer.forward("POST", "/v1/files", data.encode(), f"multipart/form-data; boundary={boundary}")
    )


_COLUMNS: Sequence[Column] = (
    Column("created_at", "Created", "moment"),
    Column("id", "Batch", "code", link=lambda row: f"{pages.ROOT}/batches/{row['id']}"),
    choices.TENANT,
    Column("model", "Model"),
    Column("endpoint", "Endpoint"),
    Column("status", "Status", "state"),
    Column("total", "Lines", "count"),
    Column("completed", "Answered", "count"),
    Column("failed", "Failed", "count"),
    Column("cached_share", "Cached share", "share"),
    Column("eta", "Time left"),
    money_column("charge_micro_units", "Cost so far"),
    choices.TENANT_ID,
)
_FAILURES: Sequence[Column] = (
    Column("state", "How it ended"),
    Column("status", "Status of the answer", "count"),
    Column("error_code", "Error"),
    Column("num_lines", "Lines", "count"),
)
_FAULT_FIELDS = ("line", "code", "message", "param")
_FAULTS: Sequence[Column] = (
    Column("line", "Line", "count"),
    Column("code", "Error"),
    Column("message", "Message"),
    Column("param", "Parameter"),
)


def _row(batch: Mapping[str, Any]) -> dict[str, Any]:
    progress = batch["headgate"]
    status = batch["status"].replace("_", " ")
    return {**batch, **batch["request_counts"], **progress, "status": status, "eta": _eta(progress["eta_s"])}


def _eta(seconds: int | None) -> str:
    if seconds is None:
        return NONE
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


ROUTES = [
    pages.get("/batches", list_batches),
    pages.post("/batches", submit),
    pages.get("/batches/{id}", show_batch),
    pages.post("/batches/{id}/cancel", cancel),
    pages.get("/batches/{id}/results", results),
    pages.get("/batches/{id}/files/{which}", download),
]
