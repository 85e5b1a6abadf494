"""The changes that a draw makes to its logits, as the tables that the op `logits` reads.

It knows draws and the order of `kernels.reference.logits`: penalties, bias, bans. It builds the tables of one step from
the ids on the host; only rows that use a table have a line in it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch

from kernels.arguments.draws import EditTensors, num_words
from workers.engine.kv.transport import upload
from workers.engine.sampling.biases import Biases, lacks_tokens
from workers.engine.sampling.prompt_words import PromptWords
from workers.engine.values.plan import SampleSpec
from workers.engine.values.sampling_params import penalizes


def needs_processing(draw: SampleSpec) -> bool:
    params = draw.params
    return (
        penalizes(params) or bool(params.logit_bias) or draw.mask is not None or bool(draw.banned) or lacks_tokens(draw)
    )


def edit_tensors(
    draws: Sequence[SampleSpec], vocab: int, device: torch.device, prompts: PromptWords, biases: Biases
) -> EditTensors:
    """Returns the edits of one step's draws, row by row."""

    def ids(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def numbers(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    penalized = [row for row, draw in enumerate(draws) if penalizes(draw.params)]
    lines = {row: line for line, row in enumerate(penalized)}
    bits = torch.zeros((len(penalized), num_words(vocab)), dtype=torch.int32, device=device)
    counts = torch.zeros((len(penalized), vocab), dtype=torch.int32, device=device)
    for row, line in lines.items():
        words = prompts.of(draws[row].prompt)
        places, values = upload(device, words.places, words.bits)
        bits[line, places.long()] = values
        output = torch.tensor(draws[row].output, dtype=torch.int64, device=device)
        counts[line] = torch.bincount(output, minlength=vocab)
    bias_tokens, bias_values, longest = biases.table(draws)
    tokens, values, masks = upload(device, bias_tokens, bias_values, mask_words(draws))
    return EditTensors(
        penalty_lines=ids([lines.get(row, -1) for row in range(len(draws))]),
        repetition=numbers([draw.params.repetition_penalty for draw in draws]),
        frequency=numbers([draw.params.frequency_penalty for draw in draws]),
        presence=numbers([draw.params.presence_penalty for draw in draws]),
        prompt_bits=bits,
        counts=counts,
        bias_tokens=tokens.view(-1, longest),
        biases=values.view(torch.float32).view(-1, longest),
        mask_lines=ids(mask_lines(draws).tolist()),
        mask_bits=masks.view(-1, num_words(vocab)),
    )


def mask_lines(draws: Sequence[SampleSpec]) -> array[int]:
    """Returns for each draw the line of its mask in `mask_words`; -1 if it has none."""
    lines = itertools.count()
    return array("i", [-1 if draw.mask is None else next(lines) for draw in draws])


def mask_words(draws: Sequence[SampleSpec]) -> array[int]:
    """Returns the masks, one after the other."""
    return array("i", b"".join(draw.mask for draw in draws if draw.mask is not None))
