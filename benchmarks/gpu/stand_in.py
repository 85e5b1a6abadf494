"""A GPU image has torch, Triton and transformers, but not msgspec, which the engine's messages are declared with.

Where it is missing, frozen dataclasses take the place of its structs. The engine is then driven in one process, so
nothing is ever encoded; with msgspec installed this does nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=False)
class Struct:
    """`msgspec.Struct` as far as declaring and constructing goes."""

    def __init_subclass__(cls, frozen: bool = True, **_: Any) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=frozen)(cls)


class Codec:
    """May be made, as modules do when they are imported, but not used."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("nothing can be encoded without msgspec")

    decode = encode


def install() -> None:
    if importlib.util.find_spec("msgspec") is None:
        module = types.ModuleType("msgspec")
        module.Struct = Struct
        module.field = dataclasses.field
        module.msgpack = types.SimpleNamespace(Encoder=Codec, Decoder=Codec)
        module.structs = types.SimpleNamespace(replace=dataclasses.replace)
        sys.modules["msgspec"] = module
