"""The facts of an answer's prompts: their token ids, and the logprobs of their tokens. The module is pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.text.tokenizer import ModelTokenizer
from gateway.writers.chunks import finite, id_name
from workers.protocol.messages import TokenLogprob
from workers.protocol.prompt_logprobs import unpack


def scored(
    tokenizer: ModelTokenizer, prompt: Sequence[int], parts: Sequence[bytes], num_top: int, *, names_ids: bool = False
) -> msgspec.Raw:
    """Returns the prompt's logprobs as JSON: one value per token, null for the first, else token id → its logprob, rank
    and text, for the token itself and the `num_top` best. The rank of a token that is not among the best is null. It is
    encoded part by part: no part holds the interpreter's lock for long.
    """

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = id_name(token) if names_ids else tokenizer.token_text(token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def position(token: int, found: TokenLogprob | None) -> dict[str, Any] | None:
        if found is None:
            return None
        best = {str(one.token): entry(one.token, one.logprob, i + 1) for i, one in enumerate(found.top[:num_top])}
        return {str(token): best.get(str(token)) or entry(token, found.logprob, None)} | best

    pieces, first = [], 0
    for part in unpack(parts):
        values = [position(*pair) for pair in zip(prompt[first : first + len(part)], part, strict=True)]
        pieces.append(msgspec.json.encode(values)[1:-1])
        first += len(part)
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
