"""From logits to tokens: one token per draw, with logprobs where asked.

Knows draws (plan.py) and ops. Does not know sequences or KV. A drawn token depends on its own row only, never on
the rows beside it.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import torch

from kernels.dispatch import Ops
from kernels.reference.sample import DrawTensors
from workers.engine.plan import Draw, Drawn
from workers.engine.sampling import processors
from workers.engine.transport import upload
from workers.protocol.messages import TokenLogprob, TopLogprob

_COLDEST = 1e-6
"""Below this temperature the largest logit wins every draw that float32 can tell apart, and division overflows."""


class Sampler:
    def __init__(self, ops: Ops, eos_token_ids: Sequence[int]) -> None:
        self._ops = ops
        self._eos_token_ids = tuple(eos_token_ids)

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """`logits` is `[len(draws), vocab]` float32, one row per draw; it is not changed."""
        logprobs = Logprobs(logits, draws)
        if any(map(processors.needs_processing, draws)):
            logits = logits.clone()
            self.process(logits, draws)
        tokens = self._choose(logits, draws)
        found = logprobs.read(logprobs.of(tokens))
        return [Drawn(token, found.get(row)) for row, token in enumerate(tokens.tolist())]

    def process(self, logits: torch.Tensor, draws: Sequence[Draw]) -> None:
        """Penalties, bias and bans, in place."""
        for row, draw in enumerate(draws):
            if processors.needs_processing(draw):
                processors.process(logits[row], draw, self._eos_token_ids)

    def choose(self, logits: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
        """`[rows]` tokens, greedy where the temperature is 0. Nothing of the draws is known to the host, which waits
        for nothing but what the chosen `sample` waits for."""
        greedy = draws.temperature < _COLDEST
        warm = dataclasses.replace(draws, temperature=draws.temperature.masked_fill(greedy, 1.0))
        return torch.where(greedy, logits.argmax(dim=-1), self._ops.sample(logits, warm))

    def _choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """The same where the host knows which rows are greedy, and spares them the noise."""
        greedy = logits.argmax(dim=-1)
        random = [row for row, draw in enumerate(draws) if is_random(draw)]
        if random:
            rows = torch.tensor(random, device=logits.device)
            tensors = _draw_tensors([draws[row] for row in random], logits.device)
            part = logits if len(random) == len(draws) else logits[rows]
            greedy[rows] = self._ops.sample(part, tensors)
        return greedy


def is_random(draw: Draw) -> bool:
    return draw.params.temperature >= _COLDEST


class Logprobs:
    """Raw logits of the draws that want logprobs, kept until their tokens are there: log-softmax before every
    transformation."""

    def __init__(self, logits: torch.Tensor, draws: Sequence[Draw]) -> None:
        self._rows = [row for row, draw in enumerate(draws) if draw.params.logprobs >= 0]
        self._num_top = [draws[row].params.logprobs for row in self._rows]
        if self._rows:
            (self._ids,) = upload(logits.device, array("i", self._rows))
            self._raw = logits.index_select(0, self._ids)

    def of(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """On the device: nothing, or the tokens' own logprobs, the best ids and theirs."""
        if not self._rows:
            return []
        ids = tokens.index_select(0, self._ids)
        return [*_logprob_tensors(self._raw, ids, max(self._num_top))]

    def read(self, found: Sequence[torch.Tensor]) -> dict[int, TokenLogprob]:
        """What `of` gave, in values, by draw."""
        if not self._rows:
            return {}
        values = _token_logprobs(*found)
        return {
            row: TokenLogprob(value.logprob, value.top[:num_top])
            for row, num_top, value in zip(self._rows, self._num_top, values, strict=True)
        }


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-softmax of raw logits: of one given token per row, and of the `num_top` best."""
    ids = torch.tensor(tokens, device=logits.device)
    return _token_logprobs(*_logprob_tensors(logits, ids, num_top))


def _logprob_tensors(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return logprobs.gather(1, tokens[:, None]).squeeze(1), best.indices, best.values


def _token_logprobs(
    own: torch.Tensor, best: torch.Tensor, best_values: torch.Tensor
) -> list[TokenLogprob]:
    return [
        TokenLogprob(logprob, tuple(map(TopLogprob, top, values)))
        for logprob, top, values in zip(
            own.tolist(), best.tolist(), best_values.tolist(), strict=True
        )
    ]


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
