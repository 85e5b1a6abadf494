"""Penalties, bias and bans of rows whose last output tokens the host does not know yet: counts live on the device.

It knows plan.py's rows and the op `logits`. A penalized device row owns the line of its number in two tables: which
tokens its prompt holds, and how often its output holds each token. A row that is sent whole has its counts rewritten,
and the words of its prompt unless they stand there; after each draw the token is counted on the device.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.arguments.draws import EditTensors, num_words
from kernels.dispatch import Ops
from workers.engine.kv.transport import float_bits, upload
from workers.engine.sampling import processors
from workers.engine.sampling.biases import Biases
from workers.engine.sampling.prompt_words import PromptWords, Words
from workers.engine.values.plan import PENDING, Row, SampleSpec
from workers.engine.values.sampling_params import penalizes


@dataclass(slots=True)
class _Lines:
    """Lines that are rewritten: indices in the flat tables, and the values there."""

    prompt_rows: array[int] = field(default_factory=lambda: array("i"))
    prompt_lines: array[int] = field(default_factory=lambda: array("i"))
    words: array[int] = field(default_factory=lambda: array("i"))
    bits: array[int] = field(default_factory=lambda: array("i"))
    rows: array[int] = field(default_factory=lambda: array("i"))
    count_lines: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("i"))

    def add_prompt(self, row_id: int, words: Words) -> None:
        self.prompt_rows.append(row_id)
        self.prompt_lines += array("i", [row_id]) * len(words.places)
        self.words += words.places
        self.bits += words.bits

    def add_output(self, row_id: int, output: Sequence[int]) -> None:
        counts = Counter(output)
        self.rows.append(row_id)
        self.count_lines += array("i", [row_id]) * len(counts)
        self.tokens.extend(counts.keys())
        self.counts.extend(counts.values())


class DeviceEdits:
    def __init__(
        self, ops: Ops, max_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        self._ops = ops
        self._biases = Biases(eos_token_ids)
        self._device = device
        self._prompt_bits = torch.zeros((max_rows, num_words(vocab_size)), dtype=torch.int32, device=device)
        self._counts = torch.zeros((max_rows, vocab_size), dtype=torch.int32, device=device)
        self._num_words = num_words(vocab_size)
        self._prompts = PromptWords()
        self._written: dict[int, Words] = {}
        """The words that stand in the line of a device row."""

    def begin(self, rows: Sequence[Row]) -> None:
        """Rewrites lines before the draws of these rows. The choices of one row have no output yet, so one line serves
        them all."""
        lines, written = _Lines(), dict[int, Words]()
        for row in rows:
            if row.draws and row.tokens[-1] != PENDING and penalizes(row.draws[0].params):
                draw, words = row.draws[0], self._prompts.of(row.draws[0].prompt)
                lines.add_output(row.row_id, draw.output)
                if self._written.get(row.row_id) is not words:
                    lines.add_prompt(row.row_id, words)
                    written[row.row_id] = words
        if not lines.rows:
            return
        parts = (lines.prompt_rows, lines.prompt_lines, lines.words, lines.bits)
        counted = (lines.rows, lines.count_lines, lines.tokens, lines.counts)
        prompt_ids, prompt_lines, words_at, bits, ids, count_lines, tokens, counts = upload(
            self._device, *parts, *counted
        )
        if written:
            for row_id in written:
                self._written.pop(row_id, None)  # whatever fails below, the line is not taken for written
            self._prompt_bits.index_fill_(0, prompt_ids.long(), 0)
            self._prompt_bits.index_put_((prompt_lines.long(), words_at.long()), bits)
            self._written.update(written)
        self._counts.index_fill_(0, ids.long(), 0)
        self._counts.index_put_((count_lines.long(), tokens.long()), counts)

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Edits logits `[num_draws, vocab]` in place; they belong to the draws of the rows, in order."""
        flat = [(row.row_id, draw) for row in rows for draw in row.draws]
        edited = [
            (place, row_id, draw) for place, (row_id, draw) in enumerate(flat) if processors.needs_processing(draw)
        ]
        if not edited:
            return
        ids = array("i", [place for place, _, _ in edited])
        tensors, places = self._tensors(ids, edited)
        raw = logits.index_select(0, places)
        changed = torch.empty_like(raw)
        self._ops.logits(changed, raw, tensors, torch.ones_like(tensors.repetition))
        logits.index_copy_(0, places, changed)

    def count(self, tokens: torch.Tensor, rows: Sequence[Row]) -> None:
        """Counts the drawn `tokens` `[num_draws]`. A row with several draws is sent whole afterwards, so it is not
        counted."""
        places, lines, first = array("i"), array("i"), 0
        for row in rows:
            if len(row.draws) == 1 and penalizes(row.draws[0].params):
                places.append(first)
                lines.append(row.row_id)
            first += len(row.draws)
        if places:
            at, counted = upload(self._device, places, lines)
            self._ops.count_tokens(self._counts, counted, tokens.index_select(0, at))

    def _tensors(
        self, ids: array[int], edited: Sequence[tuple[int, int, SampleSpec]]
    ) -> tuple[EditTensors, torch.Tensor]:
        draws = [draw for _, _, draw in edited]
        bias_tokens, bias_values, longest = self._biases.table(draws)
        lines = [row_id if penalizes(draw.params) else -1 for _, row_id, draw in edited]
        params = [draw.params for draw in draws]
        places, penalty_lines, repetition, frequency, presence, tokens, values, masks, bits = upload(
            self._device,
            ids,
            array("i", lines),
            float_bits([p.repetition_penalty for p in params]),
            float_bits([p.frequency_penalty for p in params]),
            float_bits([p.presence_penalty for p in params]),
            bias_tokens,
            bias_values,
            processors.mask_lines(draws),
            processors.mask_words(draws),
        )
        return EditTensors(
            penalty_lines=penalty_lines,
            repetition=repetition.view(torch.float32),
            frequency=frequency.view(torch.float32),
            presence=presence.view(torch.float32),
            prompt_bits=self._prompt_bits,
            counts=self._counts,
            bias_tokens=tokens.view(-1, longest),
            biases=values.view(torch.float32).view(-1, longest),
            mask_lines=masks,
            mask_bits=bits.view(-1, self._num_words),
        ), places.long()
