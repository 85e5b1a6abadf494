"""The writer of `POST /v1/responses/compact`: the client's own messages, and a summary that only we can read. The
module is pure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gateway.base.errors import ApiError
from gateway.generation.generation import ChoicePiece
from gateway.generation.stream import Numbered
from gateway.generation.writer import Ending
from gateway.http.sse import RESPONSES
from gateway.parsers.parts import Text
from gateway.writers.response_items import Seal
from gateway.writers.responses import usage_of


class CompactionWriter:
    """The writer (`gateway/generation/writer.py`) of a compaction, which has a body and no stream."""

    style = RESPONSES

    def __init__(self, response_id: str, kept: Sequence[Any], seal: Seal) -> None:
        """`kept` are the items that stay as they are."""
        self._id = response_id
        self._kept = kept
        self._seal = seal
        self._created_at = int(time.time())
        self._content = ""

    def choice(self, index: int, pieces: Sequence[ChoicePiece]) -> Any:
        """Takes the summary. Raises `ApiError` 422 if there is none, because the conversation would be lost. It is no fault
        of ours: a client can bound the output or ask the model to say nothing.
        """
        text = "".join(part.text for piece in pieces for part in piece.parts if isinstance(part, Text)).strip()
        if not text:
            raise ApiError(422, "The model wrote no summary. The conversation stays as you have it.", code="no_summary")
        self._content = self._seal(text)

    def whole(self, root: str, choices: Sequence[Any], ending: Ending) -> Any:
        item_id = f"cmp_{self._id.partition('_')[2]}0000"
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": self._created_at,
            "output": [*self._kept, {"id": item_id, "type": "compaction", "encrypted_content": self._content}],
            "usage": usage_of(ending.usage, ending.num_reasoning),
            "headgate": ending.headgate,
        }

    def opening(self, root: str) -> list[Any]:
        return []

    def of(self, found: Sequence[Numbered]) -> list[Any]:
        return []

    def closing(self, ending: Ending) -> list[Any]:
        return []

    def failed(self, error: ApiError, request_id: str) -> list[Any]:
        return []
