"""The import of transformers without torch's tracer and distributed tensors, which cost a second and 60 MB.

No step of a worker is traced, and its ranks share no distributed tensors. But transformers marks a few functions for the
tracer, torch marks its own at their first call, and both load all of it for a mark. Here a small module stands for the
tracer, whose marks change nothing. Whoever asks it for something else gets the real one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_TRACER, _MODES = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"


@contextmanager
def untraced() -> Iterator[None]:
    """Within the block transformers is imported; it finds no distributed tensors. The tracer stays away afterwards, too.
    Where it is loaded already, nothing is changed, nor where there is a GPU: a start takes longer there for other reasons,
    and captured graphs and Triton stand nearer to the tracer.
    """
    import torch.distributed

    if _TRACER in sys.modules or torch.cuda.is_available():
        yield
        return
    for stand_in in (_Tracer(_TRACER), _Modes(_MODES)):
        sys.modules[stand_in.__name__] = stand_in
    has_distributed = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = has_distributed


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # where its other modules are
            spec = importlib.util.find_spec("torch")
            assert spec is not None
            return [f"{place}/_dynamo" for place in spec.submodule_search_locations or ()]
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Tracer(_StandIn):
    """Its marks return the function as it is."""

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
        return function if function is not None else _as_it_is

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        return function

    @staticmethod
    def assume_constant_result(function: Any) -> Any:
        return function


class _Modes(_StandIn):
    @staticmethod
    def TransformGetItemToIndex() -> Any:  # it has the name of the class for which it stands
        return _real(_MODES).TransformGetItemToIndex()


def _as_it_is(function: Any) -> Any:
    return function


def _real(name: str) -> ModuleType:
    """Loads the tracer, and from now on there is no other."""
    for stand_in in (_TRACER, _MODES):
        if isinstance(sys.modules.get(stand_in), _StandIn):
            del sys.modules[stand_in]
    return importlib.import_module(name)
