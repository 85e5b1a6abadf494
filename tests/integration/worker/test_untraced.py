"""A worker's process does not load torch's tracer, and it is there for who asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ops.demo_model import __file__ as demo

pytestmark = pytest.mark.rest

STEPS = f"""
import sys
from pathlib import Path
from workers.engine.untraced import untraced
with untraced():
    from workers.engine.device.runner import ModelRunner, RunnerSettings
import torch, transformers
ModelRunner(RunnerSettings(str(Path({demo!r}).parent / "model"), device="cpu", num_blocks=16))
heavy = ("torch._dynamo.convert_frame", "torch._dynamo.eval_frame", "torch.distributed.tensor", "torch._inductor")
assert not [name for name in heavy if name in sys.modules]
assert torch.distributed.is_available()
assert torch._dynamo.disable(len) is len
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
assert "torch._dynamo.eval_frame" in sys.modules
traced = []
def backend(graph, inputs):
    traced.append(graph)
    return graph.forward
assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
assert traced
print("done")
"""


def test_a_model_loads_and_runs_without_the_tracer_which_can_be_loaded_later():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr[-2000:]
