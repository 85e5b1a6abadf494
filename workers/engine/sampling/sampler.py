"""Draws tokens from logits: one token per draw, with logprobs if they are asked for.

It knows draws (plan.py) and ops. It does not know sequences or KV. A drawn token depends on its own row only, never on
the other rows of the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from kernels.arguments.draws import COLDEST, DrawTensors
from kernels.dispatch import Ops
from workers.engine.kv.transport import upload
from workers.engine.sampling import processors
from workers.engine.sampling.biases import Biases
from workers.engine.sampling.prompt_words import PromptWords
from workers.engine.values.plan import SampledToken, SampleSpec
from workers.protocol.messages import TokenLogprob, TopLogprob


class Sampler:
    def __init__(self, ops: Ops, eos_token_ids: Sequence[int]) -> None:
        self._ops = ops
        self.eos_token_ids = tuple(eos_token_ids)
        self._prompts, self._biases = PromptWords(), Biases(eos_token_ids)

    def draw(self, logits: torch.Tensor, draws: Sequence[SampleSpec]) -> list[SampledToken]:
        """Draws one token per row. `logits` is `[len(draws), vocab]` float32, one row per draw; it is not changed."""
        logprobs = Logprobs(logits, draws)
        tokens = self._choose(self._process(logits, draws), draws)
        found = logprobs.read(logprobs.of(tokens))
        return [SampledToken(token, found.get(row)) for row, token in enumerate(tokens.tolist())]

    def _choose(self, logits: torch.Tensor, draws: Sequence[SampleSpec]) -> torch.Tensor:
        """Draws the tokens. Here the host knows which rows are greedy, and computes no noise for them."""
        random = [row for row, draw in enumerate(draws) if draw.params.temperature >= COLDEST]
        if len(random) == len(draws):
            return self._ops.sample(logits, _draw_tensors(draws, logits.device))
        tokens = logits.argmax(dim=-1)
        if random:
            rows = torch.tensor(random, device=logits.device)
            tensors = _draw_tensors([draws[row] for row in random], logits.device)
            tokens[rows] = self._ops.sample(logits[rows], tensors)
        return tokens

    def _process(self, logits: torch.Tensor, draws: Sequence[SampleSpec]) -> torch.Tensor:
        rows = [row for row, draw in enumerate(draws) if processors.needs_processing(draw)]
        if not rows:
            return logits
        device, vocab = logits.device, logits.shape[1]
        edited_draws = [draws[row] for row in rows]
        edits = processors.edit_tensors(edited_draws, vocab, device, self._prompts, self._biases)
        ids = torch.tensor(rows, device=device)
        edited = logits.new_empty((len(rows), vocab))
        unscaled = logits.new_ones(len(rows))
        self._ops.logits(edited, logits[ids], edits, unscaled)
        return logits.index_copy(0, ids, edited)


class Logprobs:
    """Raw logits of the draws that want logprobs, kept until their tokens are drawn. Logprobs are a log-softmax before
    every transformation."""

    def __init__(self, logits: torch.Tensor, draws: Sequence[SampleSpec]) -> None:
        self._rows = [row for row, draw in enumerate(draws) if draw.params.logprobs >= 0]
        params = [draws[row].params for row in self._rows]
        self._given = [one.logprob_token_ids for one in params]
        self._num_top = [0 if one.logprob_token_ids else one.logprobs for one in params]
        if self._rows:
            (self._ids,) = upload(logits.device, array("i", self._rows))
            raw = logits.index_select(0, self._ids)
            self._sums = raw.logsumexp(dim=-1, keepdim=True)
            best = raw.topk(min(max(self._num_top), raw.shape[1]), dim=-1)
            self._raw, self._best = raw, [best.indices, best.values - self._sums]
            width = max(map(len, self._given))
            if width:
                padded = [[*given, *(0,) * (width - len(given))] for given in self._given]
                ids = torch.tensor(padded, device=logits.device)
                self._best.append(raw.gather(1, ids) - self._sums)

    def of(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Returns tensors on the device: none if no draw wants logprobs, else the tokens' own logprobs, the best ids
        and their logprobs, and the logprobs of given ids if a draw wants those."""
        if not self._rows:
            return []
        ids = tokens.index_select(0, self._ids)
        return [(self._raw.gather(1, ids[:, None]) - self._sums).squeeze(1), *self._best]

    def read(self, found: Sequence[torch.Tensor]) -> dict[int, TokenLogprob]:
        """Converts the tensors of `of`, copied to the host, to values by draw."""
        if not self._rows:
            return {}
        values = _token_logprobs(*found[:3])
        result = {
            row: TokenLogprob(value.logprob, value.top[:num_top])
            for row, num_top, value in zip(self._rows, self._num_top, values, strict=True)
        }
        for given in found[3:]:
            for row, ids, logprobs in zip(self._rows, self._given, given.tolist(), strict=True):
                if ids:
                    top = tuple(map(TopLogprob, ids, logprobs))
                    result[row] = TokenLogprob(result[row].logprob, top)
        return result


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Returns the log-softmax of raw logits for one given token per row and for the `num_top` best."""
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    best = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return _token_logprobs(logprobs.gather(1, ids).squeeze(1), best.indices, best.values)


def _token_logprobs(own: torch.Tensor, best: torch.Tensor, best_values: torch.Tensor) -> list[TokenLogprob]:
    return [
        TokenLogprob(logprob, tuple(map(TopLogprob, top, values)))
        for logprob, top, values in zip(own.tolist(), best.tolist(), best_values.tolist(), strict=True)
    ]


def _draw_tensors(draws: Sequence[SampleSpec], device: torch.device) -> DrawTensors:
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
