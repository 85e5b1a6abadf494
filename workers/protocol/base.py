"""The base of every struct in a frame."""

from __future__ import annotations

import msgspec


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """The base of every struct in a frame. `omit_defaults` keeps a step's frame small."""
