"""The snippets of docs/clients.md: a test runs the very text that a reader copies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
_HEADING_OR_FENCE = re.compile(r"^(?:### (?P<heading>[^\n]+)|```(?P<language>\w+)\n(?P<text>.*?)^```)$", re.M | re.S)


@dataclass(frozen=True)
class Snippet:
    language: str
    text: str


def snippets(page: Path = PAGE) -> dict[str, list[Snippet]]:
    """Those below each heading of the third level, in order."""
    found: dict[str, list[Snippet]] = {}
    heading = ""
    for match in _HEADING_OR_FENCE.finditer(page.read_text()):
        if match["heading"]:
            heading = match["heading"]
        elif heading:
            found.setdefault(heading, []).append(Snippet(match["language"], match["text"]))
    return found
