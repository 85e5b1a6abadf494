"""Every setting with its default, its unit and what it does, from a file that `make configuration` writes. `NAMES` has the
variables among them, with which every process compares its environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    """The variable; for a model's setting, its name in the file."""
    process: str
    """The process that reads it, `Commands`, or `Models`."""
    default: str
    unit: str
    text: str


def read() -> list[Row]:
    path = Path(__file__).with_name("setting_rows.tsv")
    return [Row(*line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]


NAMES = frozenset(row.name for row in read() if row.name.startswith("HEADGATE_"))
