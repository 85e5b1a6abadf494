"""The past of a response: the items of the responses before it, and items that it names by id. The module is pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from accounting.responses.stored import StoredResponse
from gateway.base import errors
from gateway.responses.texts import ResponseTexts
from gateway.schema.organization import listing

MAX_REFERENCES = 1_000
"""The most items that one request names by id."""
_KEY = re.compile(r"[a-z]{2,4}_([0-9a-f]{48})[0-9a-f]{1,8}")
_PREFIXES = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "compaction": "cmp"}


class Asked(msgspec.Struct, frozen=True):
    """A body that was asked, without its input, and the input as items with ids."""

    body: dict[str, Any]
    items: list[Any]

    @property
    def whole(self) -> dict[str, Any]:
        """The body of `POST /v1/responses`."""
        return self.body | {"input": self.items}


def asked_of(response_id: str, value: Mapping[str, Any], items: Sequence[Any]) -> Asked:
    body = {name: item for name, item in value.items() if name != "input" and item is not None}
    return Asked(body, [_normal(item, _key(response_id, number)) for number, item in enumerate(items)])


def _key(response_id: str, number: int) -> str:
    """Returns what the id of an input item has behind its prefix."""
    return f"{response_id.partition('_')[2]}8{number:04x}"


def _normal(item: Any, key: str) -> Any:
    """Returns an item as the list of input items shows it: with a type, an id, and its content as parts."""
    if not isinstance(item, dict):
        return item
    kind = item.get("type") or "message"
    given = {name: value for name, value in item.items() if value is not None}
    normal = {"id": _id(kind, key), **given, "type": kind}
    if kind == "reasoning":
        return {"summary": [], **normal}
    if isinstance(text := given.get("content"), str):
        is_own = given.get("role") == "assistant"
        part = (
            {"type": "output_text", "text": text, "annotations": []} if is_own else {"type": "input_text", "text": text}
        )
        normal["content"] = [part]
    return normal if kind == "compaction" else normal | {"status": given.get("status", "completed")}


def _id(kind: Any, key: str) -> str:
    prefix = _PREFIXES.get(kind, "msg") if isinstance(kind, str) else "msg"
    return f"{prefix}_{key}"


def read_asked(texts: ResponseTexts, row: StoredResponse) -> Asked:
    """Returns what was asked. An item whose id is no text gets one of ours: such ids were once stored as they came."""
    asked = msgspec.json.decode(texts.unpack(row.id, "request", row.request), type=Asked)
    for number, item in enumerate(asked.items):
        if isinstance(item, dict) and not isinstance(item.get("id"), str):
            item["id"] = _id(item.get("type"), _key(row.id, number))
    return asked


def items_of(texts: ResponseTexts, rows: Iterable[StoredResponse]) -> list[Any]:
    """Returns inputs and outputs of responses, in their order."""
    items: list[Any] = []
    for row in rows:
        items += read_asked(texts, row).items
        if row.body is not None:
            items += texts.decoded(row.id, "body", row.body)["output"]
    return items


def check_chain(rows: Sequence[StoredResponse], most_before: int, most_bytes: int, num_bytes: int) -> None:
    """Checks that a response may go on from these, the oldest first. Raises `ApiError` 400."""
    param = "previous_response_id"
    if not rows or rows[0].previous_id is not None:
        message = "The previous response, or one before it, does not exist, has expired, or was deleted."
        raise errors.invalid(message, param, "previous_response_not_found")
    if rows[-1].state in ("queued", "in_progress", "failed"):
        raise errors.invalid(f"A response cannot go on from one that is {rows[-1].state}.", param)
    if rows[-1].num_before + 1 >= most_before or rows[-1].chain_bytes + num_bytes > most_bytes:
        message = f"A conversation has at most {most_before:,} responses and {most_bytes:,} bytes of items."
        raise errors.invalid(message, param, "context_length_exceeded")


def referenced(items: Sequence[Any]) -> dict[str, str]:
    """Returns the responses of the items that are named by id, as (item id → response id). Raises `ApiError` 400."""
    found: dict[str, str] = {}
    for index, item in enumerate(items):
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            continue
        name = item.get("id")
        match = _KEY.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise _unknown_item(index)
        found[match[0]] = f"resp_{match[1]}"
    if len(set(found.values())) > MAX_REFERENCES:
        raise errors.invalid(f"Items of at most {MAX_REFERENCES:,} responses may be named.", "input")
    return found


def resolved(items: Sequence[Any], known: Mapping[str, Any], most_bytes: int) -> tuple[list[Any], int]:
    """Replaces items that are named by id by the items. Returns all items, and the bytes of the named ones, each as
    often as it is named. Raises `ApiError` 400 for an unknown one, and if they have more than `most_bytes`.
    """
    sizes = {name: len(msgspec.json.encode(item)) for name, item in known.items()}
    whole: list[Any] = []
    num_bytes = 0
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            if item["id"] not in known:
                raise _unknown_item(index)
            num_bytes += sizes[item["id"]]
            if num_bytes > most_bytes:
                raise too_many_bytes(most_bytes)
            item = known[item["id"]]
        whole.append(item)
    return whole, num_bytes


def too_many_bytes(most: int) -> errors.ApiError:
    message = f"The items that are named by id have more than {most:,} bytes."
    return errors.invalid(message, "input", "context_length_exceeded")


def _unknown_item(index: int) -> errors.ApiError:
    message = "This item does not exist, has expired, or was deleted."
    return errors.invalid(message, f"input[{index}].id", "item_not_found")


def input_of(texts: ResponseTexts, before: Sequence[StoredResponse], row: StoredResponse) -> list[Any]:
    """Returns the items that a response was made from, the oldest first."""
    return [*items_of(texts, before), *read_asked(texts, row).items]


def page(items: Sequence[dict[str, Any]], *, newest_first: bool, after: str | None, most: int) -> dict[str, Any]:
    """Returns a page of items as OpenAI's list, each id once. Raises `ApiError` 400 if no item has the id `after`."""
    ordered = list({item["id"]: item for item in items}.values())
    if newest_first:
        ordered.reverse()
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise errors.invalid("No item of this response has this id.", "after")
        ordered = ordered[places[0] + 1 :]
    return listing(ordered[:most], len(ordered) > most)


def of_user(items: Sequence[Any]) -> list[Any]:
    """Returns the user's messages, which a compaction keeps as they are."""
    return [item for item in items if isinstance(item, dict) and item.get("role") == "user"]
