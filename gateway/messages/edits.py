"""Edits of the context: thoughts of earlier turns are taken out before the model reads the conversation. The module is
pure.

A turn of the assistant lasts until a user speaks; results of its calls belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.base import errors
from gateway.messages.fields import ContextManagement

CLEAR_THINKING = "clear_thinking_20251015"
_ALL = ("all", {"type": "all"})


def kept_turns(context: ContextManagement | None) -> int | None:
    """Returns how many of the newest turns with thoughts keep them; None for all of them. Raises `ApiError` 400 for an
    edit that is not offered.
    """
    bounds: list[int] = []
    for index, edit in enumerate((context and context.edits) or ()):
        where = f"context_management.edits[{index}]"
        if edit.get("type") != CLEAR_THINKING:
            message = f"'{where}' is not supported: shorten the conversation in your own program."
            raise errors.invalid(message, where, "unsupported_parameter")
        if (bound := _bound(edit, f"{where}.keep")) is not None:
            bounds.append(bound)
    return min(bounds, default=None)


def _bound(edit: Mapping[str, Any], where: str) -> int | None:
    """Returns the bound of one edit. Without `keep` all thoughts stay, which is the default of Anthropic's newer models
    and the least change for the cache.
    """
    keep = edit.get("keep")
    if keep in (None, *_ALL):
        return None
    value = keep.get("value") if isinstance(keep, dict) and keep.get("type") == "thinking_turns" else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        message = f"'{where}' must be 'all' or an object of the type 'thinking_turns' with a 'value' of at least 1."
        raise errors.invalid(message, where)
    return value


def clear_thoughts(messages: Sequence[dict[str, Any]], num_kept: int) -> None:
    """Takes the thoughts out of chat messages, except those of the newest `num_kept` turns that have any."""
    num_found, counts_next = 0, True
    for index in reversed(range(len(messages))):
        message = messages[index]
        if message.get("reasoning_content"):
            num_found, counts_next = num_found + counts_next, False
            if num_found > num_kept:
                del message["reasoning_content"]
        if message["role"] == "user" and (index == 0 or messages[index - 1]["role"] != "tool"):
            counts_next = True
