"""Runs real steps of a served model, after everything in it was packed, fused, compiled and recorded.

The probe (`model/probe.py`) compares a small copy before that. It knows rows; does not know what runs them.
"""

from __future__ import annotations

from workers.engine.device.steps import Steps
from workers.engine.values.errors import DeviceOutOfMemory, ModelError
from workers.engine.values.plan import Row, SampleSpec
from workers.protocol.messages import SamplingParams

_GREEDY = SamplingParams(seed=0, temperature=0.0)


def run(steps: Steps, kind: str, block_size: int, num_blocks: int, max_model_len: int) -> None:
    """Runs a prompt, and then a further token if there are blocks for it. `kind` is the model's type. Raises ModelError
    if the steps fail, whatever they raise."""
    room = min((num_blocks - 1) * block_size, max_model_len)
    length = max(1, min(4, room - 1))
    table = list(range(1, 1 - (-(length + 1) // block_size)))[: num_blocks - 1]
    try:
        steps.launch([_row([0] * length, 0, table)]).collect()
        if length < room:
            steps.launch([_row([0], length, table)]).collect()
    except (ModelError, DeviceOutOfMemory):
        raise
    except Exception as error:  # a model's own code may raise anything
        cause = " ".join(str(error).split())[:200]
        raise ModelError(
            f"The model type '{kind}' cannot be served: its first step fails with {type(error).__name__}: {cause}"
        ) from error
    steps.forget()


def _row(tokens: list[int], start: int, table: list[int]) -> Row:
    draw = SampleSpec(_GREEDY, 0, start + len(tokens), (), ())
    return Row(tokens, start, table, (draw,), row_id=0)
