"""What a caller of the engine can cause, as exceptions with one clear sentence each."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be served: its directory, its checkpoint or its architecture. The text is one sentence."""
