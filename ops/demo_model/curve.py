"""Draw the loss curves of `training_log.json` as `loss.svg`, without any plotting library.

python ops/demo_model/curve.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TypedDict

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 340, 50, 16, 16, 44
COLORS = {
    ("model", "train_loss"): "#9ecae1",
    ("model", "held_out_loss"): "#08519c",
    ("draft", "train_loss"): "#fdbe85",
    ("draft", "held_out_loss"): "#a63603",
}


Entry = dict[str, float]


class Run(TypedDict):
    entries: list[Entry]
    tokens: int


def entries_of(runs: list[Run]) -> list[Entry]:
    """Returns the entries of all runs that led to the weights. Their token counts go on from one run to the next."""
    entries: list[Entry] = []
    before = 0
    for run in runs:
        entries.extend({**entry, "tokens": before + entry["tokens"]} for entry in run["entries"])
        before += run["tokens"]
    return entries


def draw(log: dict[str, list[Run]]) -> str:
    lines = [(name, key, entries_of(log[name])) for name, key in COLORS]
    largest = max(entries[-1]["tokens"] for _, _, entries in lines) / 1e6
    low, high = 1.0, 9.0

    def x(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * tokens / largest

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    parts.extend(
        f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>'
        for loss in range(int(low), int(high) + 1)
    )
    parts.extend(
        f'<text x="{x(tokens):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tokens}</text>'
        for tokens in range(int(largest) + 1)
    )
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        "million tokens read (loss in nats per token)</text>"
    )
    for row, (name, key, entries) in enumerate(lines):
        color = COLORS[name, key]
        points = " ".join(f"{x(e['tokens'] / 1e6):.1f},{y(e[key]):.1f}" for e in entries)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 20 + 18 * row}" text-anchor="end" '
            f'fill="{color}">{name}, {key.removesuffix("_loss").replace("_", "-")}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=HERE, help="where training_log.json lies")
    folder = parser.parse_args().models
    log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    (folder / "loss.svg").write_text(draw(log), encoding="utf-8")


if __name__ == "__main__":
    main()
