"""Messages of one step to the gateways: deltas gathered into one frame per link, followed by endings. The module is
pure.

The order is the contract (engine.md section 3.7): an attempt's `Finished` or `Failed` follows its last delta, on the
same link, exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.engine.beams.search import Hypothesis
from workers.engine.sequences.sequence import Attempt
from workers.protocol.counts import PromptCounts
from workers.protocol.messages import (
    GATHERED_TOKENS,
    CacheProbed,
    Failed,
    Finished,
    FinishReason,
    Message,
    StepFrame,
    TokenDelta,
    TokenLogprob,
)
from workers.protocol.prompt_logprobs import pack

VECTOR_BYTES = 4 * 1024 * 1024
"""Bytes of vectors after which a step's deltas go on in another frame. A frame has at most 16 MiB, and a step may have as
many vectors as there are rows."""


class StepMessages:
    def __init__(self) -> None:
        self._deltas: dict[int, list[TokenDelta]] = {}
        self._endings: list[tuple[int, Message]] = []

    def token(
        self,
        attempt: Attempt,
        index: int,
        seq_no: int,
        token: int,
        logprob: TokenLogprob | None,
        finish: FinishReason | None,
    ) -> None:
        """Adds a token of a choice. Where the answer is read as a whole, it waits for up to 15 others, or for the end."""
        gathered = attempt.gathered
        if attempt.message.gather and attempt.prompt_sent and finish is None and len(gathered) < GATHERED_TOKENS - 1:
            gathered.append(token)
            return
        self._add(
            attempt,
            TokenDelta(
                attempt.message.request_id,
                attempt.message.attempt,
                index,
                seq_no - len(gathered),
                (*gathered, token),
                () if logprob is None else (logprob,),
                finish,
                token if finish == "stop" and token in attempt.end_ids else -1,
                *_first_delta_parts(attempt),
            ),
        )
        gathered.clear()

    def progress(self, attempt: Attempt) -> None:
        """Adds what a search has spent up to now. Its tokens come later."""
        message = attempt.message
        prompt, prompt_logprobs = _first_delta_parts(attempt)
        self._add(
            attempt,
            TokenDelta(
                message.request_id,
                message.attempt,
                0,
                0,
                prompt=prompt,
                prompt_logprobs=prompt_logprobs,
                num_spent=attempt.num_output,
            ),
        )

    def hypothesis(self, attempt: Attempt, index: int, found: Hypothesis, finish: FinishReason) -> None:
        """Adds a whole choice."""
        message, logprobs = attempt.message, found.logprobs
        self._add(
            attempt,
            TokenDelta(
                message.request_id,
                message.attempt,
                index,
                0,
                found.tokens,
                logprobs if message.sampling.logprobs >= 0 else (),
                finish,
                found.tokens[-1] if found.ended else -1,
                num_spent=attempt.num_output,
            ),
        )

    def choice_ended(self, attempt: Attempt, index: int, seq_no: int, reason: FinishReason) -> None:
        """Adds an ending without a token of its own. Tokens that were gathered go with it."""
        prompt, prompt_logprobs = _first_delta_parts(attempt)
        gathered = attempt.gathered
        self._add(
            attempt,
            TokenDelta(
                attempt.message.request_id,
                attempt.message.attempt,
                index,
                seq_no - len(gathered),
                tuple(gathered),
                finish=reason,
                prompt=prompt,
                prompt_logprobs=prompt_logprobs,
            ),
        )
        gathered.clear()

    def vector(self, attempt: Attempt, index: int, vector: bytes) -> None:
        """Adds the result of an input."""
        message = attempt.message
        self._add(attempt, TokenDelta(message.request_id, message.attempt, index, 0, finish="stop", vector=vector))

    def tell(self, link: int, answer: CacheProbed) -> None:
        """Adds an answer that belongs to no attempt, so it has no order relative to one."""
        self._endings.append((link, answer))

    def ending(self, link: int, message: Finished | Failed) -> None:
        self._endings.append((link, message))

    def take(self, step: int) -> list[tuple[int, Message]]:
        """Returns everything since the last call, in sending order."""
        messages: list[tuple[int, Message]] = [
            (link, StepFrame(step, part)) for link, deltas in self._deltas.items() for part in _parts(deltas)
        ]
        messages += self._endings
        self._deltas, self._endings = {}, []
        return messages

    def _add(self, attempt: Attempt, delta: TokenDelta) -> None:
        self._deltas.setdefault(attempt.link, []).append(delta)


def _first_delta_parts(attempt: Attempt) -> tuple[PromptCounts | None, tuple[bytes, ...]]:
    """Returns the prompt's counts and logprobs for the first delta after the prefill, and nothing for other deltas."""
    if attempt.prompt_sent or not attempt.account.closed:
        return None, ()
    attempt.prompt_sent = True
    logprobs, attempt.prompt_logprobs = attempt.prompt_logprobs, []  # they may be as large as a frame
    return attempt.account.counts, pack(logprobs)


def _parts(deltas: list[TokenDelta]) -> Iterator[tuple[TokenDelta, ...]]:
    """Yields the deltas of a step for one link, frame by frame. It is one frame, unless there are many vectors."""
    part: list[TokenDelta] = []
    num_bytes = 0
    for delta in deltas:
        if part and num_bytes + len(delta.vector) > VECTOR_BYTES:
            yield tuple(part)
            part, num_bytes = [], 0
        part.append(delta)
        num_bytes += len(delta.vector)
    yield tuple(part)
