"""A runner of the demo model on a GPU, or beside it on a CPU."""

from __future__ import annotations

from pathlib import Path

from row_schedules import MAX_ROWS

from workers.engine.device.runner import ModelRunner, RunnerSettings

DEMO = Path(__file__).parents[1] / "ops/demo_model/model"


def runner_of(directory: Path | str, device: str = "cuda", **settings: object) -> ModelRunner:
    given = {"num_blocks": 256, "block_size": 16, "dtype": "float32", "max_rows": MAX_ROWS}
    return ModelRunner(RunnerSettings(str(directory), device=device, **given | settings))
