"""The body of `/admin/v1/prefixes`. The module holds shapes only."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from gateway.base import errors
from gateway.schema.convert import OwnBody

MAX_TTL_S = 10 * 366 * 86_400


class NewPrefix(OwnBody, frozen=True):
    model: str
    name: Annotated[str, Meta(min_length=1, max_length=200)] = "Public prefix"
    messages: list[Any] | None = None
    text: Annotated[str, Meta(min_length=1)] | None = None
    token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)] | None = None
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] | None = None
    pinned: bool = True


def check(fields: NewPrefix) -> None:
    """Checks the fields. Raises `ApiError` 400."""
    given = [name for name in ("messages", "text", "token_ids") if getattr(fields, name) is not None]
    if len(given) != 1:
        raise errors.invalid(
            "Give exactly one of 'messages', 'text' and 'token_ids'.", given[1] if given else "messages"
        )
    if not fields.pinned:
        raise errors.invalid(
            "A public prefix is always pinned: one that can be evicted shows by its time whether somebody used it.",
            "pinned",
        )
