"""The conversations: what each cost and how much of it was cached, by turn; turns that lost the cache are marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.base import errors
from gateway.console import charts, choices, formats, pages
from gateway.console.screens.traffic.request import MISSES, session_address
from gateway.console.screens.traffic.requests import row_of, was_computed
from gateway.console.tables import Column, Table, money_column
from gateway.console.viewer import Viewer

PAGE_ROWS = 100
_EMPTY = (
    "No conversation was found. Requests that have a 'prompt_cache_key', a 'session_id' in their metadata or a 'user' "
    "are listed here by it."
)


async def list_sessions(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    asked = choices.asked(request, ("project_id", "model"))
    found = await viewer.get(viewer.own("sessions"), limit=PAGE_ROWS, **asked)
    tenants = await choices.tenants(viewer)
    rows = await choices.named(viewer, map(_session, found["data"]))
    return pages.show(
        request,
        viewer,
        "sessions.html",
        table=Table("sessions", choices.columns_for(viewer, _session_columns(viewer)), rows, _EMPTY),
        tenants=tenants,
        counted_from=found["counted_from_ms"] and found["counted_from_ms"] / 1000,
    )


async def show_session(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    session_id, project_id = request.query.get("session", ""), request.query.get("project_id", "")
    if not session_id:
        raise errors.invalid("Missing required parameter: 'session'.", "session", "missing_required_parameter")
    mine = {"session_id": session_id, "project_id": project_id}
    found = await viewer.listed(viewer.own("requests"), PAGE_ROWS, **mine)
    older = found["last_id"] if found["has_more"] else None
    turns = turns_of(found["data"][::-1], found["num_older"], await _answered_before(viewer, older, mine))
    names = [str(turn["turn"] or "") for turn in turns]
    return pages.show(
        request,
        viewer,
        "session.html",
        session_id=session_id,
        project_id=project_id,
        turns=turns,
        older=older,
        num_broken=sum(bool(turn["broke"]) for turn in turns),
        table=Table("session", _TURNS, turns, "This conversation has no request in the log.", {}),
        currency=turns[-1]["currency"] or "" if turns else "",
        cost=charts.stacked(
            [(_label(turn), {"cost": turn["charge_micro_units"]}) for turn in turns],
            ("cost",),
            formats.short_money,
            names,
        ),
        tokens=charts.stacked([(_label(turn), _tokens(turn)) for turn in turns], tuple(_TOKENS), below=names),
    )


async def _answered_before(viewer: Viewer, older: str | None, mine: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Returns the last answered turn before a page, by which the page's first turn is judged."""
    if older is None:
        return None
    found = await viewer.get(viewer.own("requests"), limit=1, after=older, status_class="2xx", **mine)
    return next(iter(found["data"]), None)


def turns_of(
    requests: Sequence[Mapping[str, Any]], num_older: int | None = 0, before: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Returns the turns of a conversation from its requests, the oldest first. `num_older` turns are older than these,
    and `before` is the last answered one of them. Without `num_older`, because they are too many to count, turns have no
    number. A turn broke the prefix if fewer tokens came from the cache than the turn before left there, and its prompt is
    longer, or has so many tokens and leaves what was cached.
    """
    turns: list[dict[str, Any]] = []
    for number, one in enumerate(requests, 1):
        usage = one["usage"]
        turn = row_of(one) | {
            "turn": None if num_older is None else num_older + number,
            "broke": "",
            "cached_share": None,
        }
        if usage["prompt_tokens"] and was_computed(one):
            turn["cached_share"] = usage["cached_tokens"] / usage["prompt_tokens"]
        if one["status"] < 400:
            if before is not None and _lost_the_cache(before["usage"], one):
                turn["broke"] = _reason(one["cache"])
            before = one
        turns.append(turn)
    return turns


def _lost_the_cache(before: Mapping[str, int], now: Mapping[str, Any]) -> bool:
    usage = now["usage"]
    left = before["cached_tokens"] + before["cache_write_tokens"]
    if usage["prompt_tokens"] > before["prompt_tokens"]:
        return bool(usage["cached_tokens"] < left)
    is_new_text = now["cache"]["miss_reason"] in {"diverged", "cold"}
    return is_new_text and bool(usage["cached_tokens"] < min(left, usage["prompt_tokens"]))


def _reason(cache: Mapping[str, Any]) -> str:
    at = cache["diverged_at_token"]
    reason = MISSES.get(cache["miss_reason"] or "", cache["miss_reason"]) or "the cache had less of it"
    return f"at token {at:,}: {reason}" if at is not None else str(reason)


_TOKENS = ("from the cache", "computed", "output")


def _tokens(turn: Mapping[str, Any]) -> Mapping[str, int]:
    cached = turn["cached_tokens"]
    if cached is None:
        return dict.fromkeys(_TOKENS, 0)
    return dict(zip(_TOKENS, (cached, turn["prompt_tokens"] - cached, turn["completion_tokens"]), strict=True))


def _label(turn: Mapping[str, Any]) -> str:
    share = "" if turn["cached_share"] is None else f", {turn['cached_share'] * 100:.1f} % of the prompt cached"
    return f"turn {turn['turn'] or 'without number'}: {turn['prompt_tokens']:,} tokens of prompt{share}"


_TURNS = (
    Column("turn", "Turn", "count"),
    Column("started_at", "Time", "moment"),
    Column("id", "Request", "code", link=lambda row: f"{pages.ROOT}/requests/{row['id']}"),
    Column("model", "Model"),
    Column("status", "Status", "count"),
    Column("prompt_tokens", "Prompt", "count"),
    Column("cached_tokens", "Cached", "count"),
    Column("cached_share", "Cached share", "share"),
    Column("completion_tokens", "Output", "count"),
    money_column("charge_micro_units", "Cost"),
    Column("ttft_ms", "TTFT", "ms"),
    Column("broke", "Broke the prefix", "words"),
)


def _session(one: Mapping[str, Any]) -> dict[str, Any]:
    usage = one["usage"]
    prompt = usage["prompt_tokens"]
    return {
        **one,
        **usage,
        "cached_share": usage["cached_tokens"] / prompt if prompt else None,
        "first_at": one["first_at_ms"] / 1000,
        "last_at": one["last_at_ms"] / 1000,
    }


def _session_columns(viewer: Viewer) -> Sequence[Column]:
    return [
        Column("last_at", "Last turn", "moment"),
        Column(
            "id",
            "Conversation",
            link=lambda row: session_address(row["id"], row["project_id"] if viewer.sees_all else None),
        ),
        choices.TENANT,
        Column("num_requests", "Turns", "count"),
        Column("prompt_tokens", "Prompt", "count"),
        Column("cached_share", "Cached share", "share"),
        Column("completion_tokens", "Output", "count"),
        money_column("charge_micro_units", "Cost"),
        Column("first_at", "First turn", "moment"),
        choices.TENANT_ID,
    ]


ROUTES = [pages.get("/sessions", list_sessions), pages.get("/sessions/show", show_session)]
