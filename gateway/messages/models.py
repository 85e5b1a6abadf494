"""Models as Anthropic's API lists them: `GET /v1/models` for a request that carries `anthropic-version`. The module is
pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from gateway.base import errors
from gateway.schema import query

MOST = 1000


def model_info(id: str, created_at: int, max_len: int, max_output: int | None) -> dict[str, Any]:
    """Returns the model. `created_at` is a Unix time; the bounds are in tokens."""
    created = datetime.datetime.fromtimestamp(created_at, datetime.UTC)
    return {
        "type": "model",
        "id": id,
        "display_name": id,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_len,
        "max_tokens": max_output or max_len,
    }


def page(models: Sequence[dict[str, Any]], asked: query.Query) -> dict[str, Any]:
    """Returns a page of the models: `limit` of them, after `after_id` or in front of `before_id`. Raises `ApiError`."""
    limit = query.limit(asked, 20, MOST)
    after, before = query.text(asked, "after_id"), query.text(asked, "before_id")
    if after is not None and before is not None:
        raise errors.invalid("Only one of 'after_id' and 'before_id' can be given.", "before_id")
    ids = [model["id"] for model in models]
    if after is not None:
        rest = models[_place(ids, after, "after_id") + 1 :]
        shown = rest[:limit]
    elif before is not None:
        rest = models[: _place(ids, before, "before_id")]
        shown = rest[-limit:]
    else:
        rest, shown = models, models[:limit]
    return {
        "data": shown,
        "has_more": len(rest) > len(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _place(ids: Sequence[str], id: str, param: str) -> int:
    if id not in ids:
        raise errors.invalid(f"'{param}' names no model that this key may use.", param)
    return ids.index(id)
