"""From logits to tokens: one token per draw, with logprobs where asked.

Knows draws (plan.py) and ops. Does not know sequences or KV. A drawn token depends on its own row only, never on
the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.dispatch import Ops
from kernels.draws import DrawTensors
from workers.engine.plan import Draw, Drawn
from workers.engine.sampling import processors
from workers.protocol.messages import TokenLogprob, TopLogprob


class Sampler:
    def __init__(self, ops: Ops, eos_token_ids: Sequence[int]) -> None:
        self._ops = ops
        self._eos_token_ids = tuple(eos_token_ids)

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """`logits` is `[len(draws), vocab]` float32, one row per draw; it is not changed."""
        processed = self._process(logits, draws)
        tokens = self._ops.sample(processed, _draw_tensors(draws, logits.device)).tolist()
        logprobs = _drawn_logprobs(logits, draws, tokens)
        return [Drawn(token, logprobs.get(row)) for row, token in enumerate(tokens)]

    def _process(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        rows = [row for row, draw in enumerate(draws) if processors.needs_processing(draw)]
        if not rows:
            return logits
        device, vocab = logits.device, logits.shape[1]
        edits = processors.edit_tensors(
            [draws[row] for row in rows], vocab, self._eos_token_ids, device
        )
        ids = torch.tensor(rows, device=device)
        edited = logits.new_empty((len(rows), vocab))
        unscaled = logits.new_ones(len(rows))
        self._ops.logits(edited, logits[ids], edits, unscaled)
        return logits.index_copy(0, ids, edited)


def _draw_tensors(draws: Sequence[Draw], device: torch.device) -> DrawTensors:
    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def integers(values: list[int] | list[tuple[int, int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return DrawTensors(
        temperature=floats([draw.params.temperature for draw in draws]),
        top_k=integers([draw.params.top_k for draw in draws]),
        top_p=floats([draw.params.top_p for draw in draws]),
        min_p=floats([draw.params.min_p for draw in draws]),
        seeds=integers([(draw.seed & 0xFFFFFFFF, draw.seed >> 32) for draw in draws]),
        positions=integers([draw.position for draw in draws]),
    )


def _drawn_logprobs(
    logits: torch.Tensor, draws: Sequence[Draw], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    rows = [row for row, draw in enumerate(draws) if draw.params.logprobs >= 0]
    if not rows:
        return {}
    found = token_logprobs(
        logits[torch.tensor(rows, device=logits.device)],
        [tokens[row] for row in rows],
        max(draws[row].params.logprobs for row in rows),
    )
    return {
        row: TokenLogprob(logprob.logprob, logprob.top[: draws[row].params.logprobs])
        for row, logprob in zip(rows, found, strict=True)
    }


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-softmax of raw logits: of one given token per row, and of the `num_top` best."""
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    own = logprobs.gather(1, ids).squeeze(1).tolist()
    best = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return [
        TokenLogprob(logprob, tuple(map(TopLogprob, top, values)))
        for logprob, top, values in zip(
            own, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
