"""What formats of KV and of weights cost in quality: perplexity of the demo model on held-out text, on this machine.

    python benchmarks/quality.py --write docs/quality.md

All formats read the same rows through the real runner, in chunks as a prefill does; every chunk attends over what the
ones before it left in blocks. The table: perplexity per token, its change against nothing rounded in the same dtype, how
often the most likely token is the same, and bytes of KV per token. `--write` puts it between the marks of a page.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

DEMO_MODEL = Path(__file__).resolve().parents[1] / "ops/demo_model"
sys.path.insert(0, str(DEMO_MODEL))

import corpus  # of the demo model, which is not a package of the project
import data
from tokenizers import Tokenizer

from workers.engine.plan import Row
from workers.engine.runner import ModelRunner, RunnerSettings

BLOCK_SIZE, CHUNK = 16, 512
EXACT = ("auto", "none")
FORMATS = [
    EXACT,
    ("int8", "none"),
    ("fp8", "none"),
    ("auto", "int8"),
    ("auto", "fp8"),
    ("auto", "int4"),
    ("int8", "int8"),
    ("int8", "int4"),
]
"""Of KV and of weights; the first is what the others are compared with."""
MARKS = ("<!-- measured -->", "<!-- /measured -->")


@dataclass(frozen=True)
class Reading:
    nats: float
    best: list[int]
    """The most likely token at every place."""
    kv_bytes: float
    """Per token."""


def held_out_rows(num_rows: int, length: int) -> list[list[int]]:
    """As `ops/demo_model/evaluate.py` cuts them, every other one of documents and of conversations."""
    tok = Tokenizer.from_file(str(DEMO_MODEL / "model/tokenizer.json"))
    docs = data.documents()
    texts = corpus.encode_documents(tok, [doc.text for doc in docs if doc.held_out])
    talks = corpus.encode_conversations(tok, corpus.render(1, docs, held_out=True))
    pairs = zip(*(corpus.held_out_rows(found, length) for found in (texts, talks)), strict=False)
    rows = [row.tolist() for pair in pairs for row in pair]
    return rows[:num_rows]


def read(runner: ModelRunner, row: list[int]) -> tuple[list[float], list[int]]:
    """Log-probability of each token behind the first, and the most likely token in its place."""
    table = list(range(1, 2 + len(row) // BLOCK_SIZE))
    logprobs, best = [], []
    for start in range(0, len(row) - 1, CHUNK):
        end = min(start + CHUNK, len(row) - 1)
        part = Row(row[start:end], start, table, prompt_logprobs=1, next_token=row[end])
        (result,) = runner.execute([part])
        logprobs += [token.logprob for token in result.prompt_logprobs]
        best += [token.top[0].token for token in result.prompt_logprobs]
    return logprobs, best


def measure(rows: list[list[int]], threads: int, dtype: str, kv: str, weights: str) -> Reading:
    runner = ModelRunner(
        RunnerSettings(
            str(DEMO_MODEL / "model"),
            device="cpu",
            dtype=dtype,
            kv_dtype=kv,
            quant=weights,
            block_size=BLOCK_SIZE,
            num_blocks=3 + max(map(len, rows)) // BLOCK_SIZE,
            num_threads=threads,
        )
    )
    nats, best = 0.0, []
    for row in rows:
        logprobs, likely = read(runner, row)
        nats -= math.fsum(logprobs)
        best += likely
    return Reading(nats, best, runner.store.shape.bytes_per_block / BLOCK_SIZE)


def table(rows: list[list[int]], threads: int) -> Iterator[str]:
    num_tokens = sum(len(row) - 1 for row in rows)
    yield f"{num_tokens:,} held-out tokens in {len(rows)} rows, chunks of {CHUNK}.\n"
    yield "| dtype | KV | weights | perplexity | change | same best token | KV bytes per token |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for dtype in ("float32", "bfloat16"):
        exact = None
        for kv, weights in FORMATS:
            found = measure(rows, threads, dtype, kv, weights)
            exact = exact or found
            change = math.exp((found.nats - exact.nats) / num_tokens) - 1
            same = sum(a == b for a, b in zip(found.best, exact.best, strict=True)) / num_tokens
            yield (
                f"| {dtype} | {kv} | {weights} | {math.exp(found.nats / num_tokens):.4f} "
                f"| {change:+.3%} | {same:.2%} | {found.kv_bytes:.0f} |"
            )


def write(page: Path, lines: list[str]) -> None:
    """Replaces what stands between the marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise SystemExit(f"{page} has no place for a table: {MARKS[0]} and {MARKS[1]}.")
    text = "\n".join([before + MARKS[0], "", *lines, "", MARKS[1] + after])
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16, help="rows of `length` tokens")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", type=Path, help="a page with the marks, e.g. docs/quality.md")
    told = parser.parse_args()
    lines = []
    for line in table(held_out_rows(told.rows, told.length), told.threads):
        print(line, flush=True)
        lines.append(line)
    if told.write:
        write(told.write, lines)


if __name__ == "__main__":
    main()
