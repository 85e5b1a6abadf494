"""Plain-torch twins of `kernels.triton.sampling.logits`: changes to logits before a draw, and the counts that penalties
read.

The order is: repetition, frequency and presence penalty, bias and bans, grammar mask, temperature. Each row is a
function of itself; a row without edits is copied.
"""

from __future__ import annotations

import torch

from kernels.arguments.draws import COLDEST, EditTensors, Workspace


def logits(
    out: torch.Tensor,
    raw: torch.Tensor,
    edits: EditTensors,
    temperature: torch.Tensor,
    workspace: Workspace | None = None,
) -> None:
    """Writes to `out` the `raw` logits `[rows, vocab]` float32, edited and divided by the row's temperature (greedy
    rows are not divided). The compiled kernel leaves sums in `workspace`, so that the op `sample` need not read the row
    for them; this twin does not."""
    out.copy_(raw)
    for row, line in enumerate(edits.penalty_lines.tolist()):
        if line >= 0:
            _penalize(out[row], edits, row, line)
    for row, number in enumerate((edits.bias_tokens < raw.shape[1]).sum(dim=1).tolist()):
        if number:
            tokens = edits.bias_tokens[row, :number].long()
            out[row].index_add_(0, tokens, edits.biases[row, :number])
    for row, line in enumerate(edits.mask_lines.tolist()):
        if line >= 0:
            allowed = unpack_bits(edits.mask_bits[line], raw.shape[1])
            out[row].masked_fill_(~allowed, float("-inf"))
    out /= torch.where(temperature < COLDEST, 1.0, temperature)[:, None]


def _penalize(values: torch.Tensor, edits: EditTensors, row: int, line: int) -> None:
    counts = edits.counts[line]
    seen = unpack_bits(edits.prompt_bits[line], len(values)) | (counts > 0)
    penalty = edits.repetition[row]
    scaled = torch.where(values < 0, values * penalty, values / penalty)
    change = edits.frequency[row] * counts + edits.presence[row] * (counts > 0)
    values.copy_(torch.where(seen, scaled, values) - change)


def count_tokens(counts: torch.Tensor, lines: torch.Tensor, tokens: torch.Tensor) -> None:
    """Adds one to `counts` `[lines, vocab]` int32 for each row's token; a row with line -1 counts nothing. No two rows
    have the same line."""
    used = lines >= 0
    counts[lines[used].long(), tokens[used]] += 1


def unpack_bits(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Returns `[vocab]` bool from `[words]` int32."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts) & 1).view(-1)[:vocab].bool()
