"""Body and object of `/admin/v1/prefixes`. Shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from accounting.prefixes import PrefixInfo
from gateway import errors
from gateway.prefixes import Fill

MAX_TTL_S = 10 * 366 * 86_400


class NewPrefix(msgspec.Struct, frozen=True):
    model: str
    name: Annotated[str, Meta(min_length=1, max_length=200)] = "Public prefix"
    messages: list[Any] | None = None
    text: Annotated[str, Meta(min_length=1)] | None = None
    token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)] | None = (
        None
    )
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] | None = None
    pinned: bool = True


def check(fields: NewPrefix) -> None:
    """Raises `ApiError` 400."""
    given = [
        name for name in ("messages", "text", "token_ids") if getattr(fields, name) is not None
    ]
    if len(given) != 1:
        raise errors.invalid(
            "Give exactly one of 'messages', 'text' and 'token_ids'.",
            given[1] if given else "messages",
        )
    if not fields.pinned:
        raise errors.invalid(
            "A public prefix is always pinned: one that can be evicted shows by its time whether somebody used it.",
            "pinned",
        )


def prefix(info: PrefixInfo, fills: Mapping[str, Fill]) -> dict[str, Any]:
    return {
        "id": info.id, "object": "prefix", "name": info.name, "model": info.model, "num_tokens": len(info.tokens),
        "created_at": info.created_at, "expires_at": info.expires_at, "pinned": True, "state": _state(fills),
        "workers": [
            {"worker": worker, "state": fill.state, "num_tokens": fill.num_tokens, "reason": fill.reason or None}
            for worker, fill in sorted(fills.items())
        ],
    }  # fmt: skip


def _state(fills: Mapping[str, Fill]) -> str:
    """Of all workers together; without one, it waits to be filled."""
    states = {fill.state for fill in fills.values()}
    return "failed" if "failed" in states else "pinned" if states == {"pinned"} else "filling"
