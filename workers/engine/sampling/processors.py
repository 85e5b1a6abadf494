"""Changes to logits before a token is drawn: penalties, bias, the ban on end tokens.

Order: repetition, frequency and presence penalty, bias, min_tokens. Works on one row at a time, because a row that
asks for any of it is the exception; a row's own tokens are few beside the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from workers.engine.plan import Draw
from workers.protocol.messages import SamplingParams


def needs_processing(draw: Draw) -> bool:
    params = draw.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
        or _num_output(draw) < params.min_tokens
    )


def counts_output(draw: Draw) -> bool:
    """Whether it matters which tokens the output holds."""
    params = draw.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def process(logits: torch.Tensor, draw: Draw, eos_token_ids: Sequence[int]) -> None:
    """Changes one row `[vocab]` in place."""
    params = draw.params
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits, draw)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        _penalize_output(logits, draw)
    if params.logit_bias:
        ids = [token for token, _ in params.logit_bias]
        bias = [value for _, value in params.logit_bias]
        logits.index_add_(0, _ids(ids, logits), _values(bias, logits))
    if _num_output(draw) < params.min_tokens:
        logits[_ids(end_tokens(params, eos_token_ids), logits)] = float("-inf")


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Every token that may end a choice, whether or not the model's own ones do here."""
    return [*eos_token_ids, *params.stop_token_ids]


def _num_output(draw: Draw) -> int:
    """A token that is not known yet counted too."""
    return draw.position - len(draw.prompt)


def _penalize_repetition(logits: torch.Tensor, draw: Draw) -> None:
    """Over prompt and output, once per token: towards zero from above, away from it below."""
    ids = _ids(sorted({*draw.prompt, *draw.output}), logits)
    scores, penalty = logits[ids], draw.params.repetition_penalty
    logits[ids] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _penalize_output(logits: torch.Tensor, draw: Draw) -> None:
    """Over the output only: per occurrence, and once for having occurred."""
    counts = Counter(draw.output)
    if not counts:
        return
    number = _values(list(counts.values()), logits)
    params = draw.params
    logits[_ids(list(counts), logits)] -= (
        params.frequency_penalty * number + params.presence_penalty
    )


def _ids(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _values(values: Sequence[float], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)
