"""Plain-torch twin of `kernels.triton.rows`: prepares the inputs of a decode step from the device rows of running
sequences.

It knows device rows. It does not know sequences, tokens' meaning or what a step is for.
"""

from __future__ import annotations

import torch

from kernels.arguments.batch import DeviceRows, StepInputs


def input_prep(inputs: StepInputs, rows: DeviceRows, active: torch.Tensor, block_size: int) -> None:
    """Fills `inputs` for the rows `active` `[bucket]`. Where `active` is -1 the bucket is padded with token and
    position 0, slot -1, length 0 and the null block."""
    real = active >= 0
    chosen = active.clamp(min=0).long()
    inputs.token_ids.copy_(torch.where(real, rows.last_tokens[chosen], 0))
    positions = torch.where(real, rows.positions[chosen], 0)
    inputs.positions.copy_(positions)
    table = torch.where(real[:, None], rows.block_table[chosen], 0)
    inputs.block_table.copy_(table)
    blocks = table.gather(1, (positions // block_size).long()[:, None]).squeeze(1)
    slots = blocks * block_size + positions % block_size
    inputs.slots.copy_(torch.where(real, slots, -1))
    inputs.seq_lens.copy_(torch.where(real, positions + 1, 0))


def advance_rows(rows: DeviceRows, active: torch.Tensor, tokens: torch.Tensor) -> None:
    """Makes the drawn `tokens` `[bucket]` the last ones of the rows `active`, each one position further."""
    real = active >= 0
    chosen = active[real].long()
    rows.last_tokens[chosen] = tokens[real].to(rows.last_tokens.dtype)
    rows.positions[chosen] += 1
