"""Books: whether they are right, what nobody paid for and of which tenant, and how far each gateway's journal is posted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.console import choices, pages
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

NUM_NAMED = 5
"""The failures of an equation that the page names. The command line names them all."""


async def show_books(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.get("/admin/v1/books")
    verified = found["verified"]
    losing = await choices.named(viewer, (found["watched"] or {}).get("written_off", ()))
    tables = [_equations(verified), _write_offs(verified), _journals(found), _losing(losing)]
    return pages.show(request, viewer, "books.html", found=found, verified=verified, tables=tables)


async def verify(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    await viewer.post("/admin/v1/verify-books", {})
    return pages.see_other("/books")


def _equations(verified: Mapping[str, Any] | None) -> Table:
    rows = [
        {
            **one,
            "verdict": "holds" if one["ok"] else "FAILS",
            "num_failures": len(one["failures"]),
            "named": ", ".join(one["failures"][:NUM_NAMED]),
        }
        for one in (verified or {}).get("equations", ())
    ]
    columns = (
        Column("id", "Id"),
        Column("name", "Equation"),
        Column("verdict", "Verdict", "state"),
        Column("num_checked", "Checked", "count"),
        Column("num_failures", "Failures", "count"),
        Column("named", "The first of them"),
        Column("meaning", "Meaning", "words"),
    )
    return Table("equations", columns, rows, "The books were not verified since Redis was started. Run the check.")


def _write_offs(verified: Mapping[str, Any] | None) -> Table:
    lost = (verified or {}).get("written_off_tokens", {})
    rows = [{"reason": reason, "num_tokens": lost[reason]} for reason in sorted(lost, key=lambda one: -lost[one])]
    columns = (Column("reason", "Reason"), Column("num_tokens", "Tokens", "count"))
    return Table("write-offs", columns, rows, "Nothing was written off, as far as the books were verified.")


def _losing(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        choices.TENANT,
        Column("num_tokens", "Tokens", "count"),
        Column("share", "Share of its tokens", "share"),
        Column("reason", "Reason for most"),
        choices.TENANT_ID,
    )
    return Table("tenants-written-off", columns, rows, "Of no tenant more than 1 % of its tokens was written off.")


def _journals(found: Mapping[str, Any]) -> Table:
    columns = (
        Column("slot", "Gateway slot", "count"),
        Column("posted_seq", "Posted up to record", "count"),
        Column("posted_at", "Last posting", "moment"),
    )
    return Table("journals", columns, found["journals"], "No gateway has posted anything yet.")


ROUTES = [pages.get("/books", show_books), pages.post("/books/verify", verify)]
