"""Tiny models, and one thread for all sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_models import TinyModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes a model by its name, once for the tests of a module, which only read it."""

    @functools.cache
    def make(name: str) -> TinyModel:
        return TinyModel.make(name, tmp_path_factory.mktemp(name))

    return make
