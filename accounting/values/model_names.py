"""The names under which requests are priced, billed and counted. The module is pure."""

from __future__ import annotations


def base_of(name: str) -> str:
    """Returns the model whose limits bind what is billed under `name`: an adapter is NAME:ADAPTER, and what an upstream
    answers in place of our own workers is NAME:overflow. It is empty for a name without a colon."""
    return name.rpartition(":")[0]
