"""The tiny models, written once per test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_models import TinyModel

from workers.engine.commands import cpu_speed


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            made[name] = TinyModel.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture(scope="session", autouse=True)
def measured_briefly() -> Iterator[None]:
    """`headgate plan` measures this CPU for more than a second. What tests look at does not depend on how exact that is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_speed, "_LIMIT_S", 0.02)
        yield
