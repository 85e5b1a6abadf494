"""What 8-bit KV costs in quality: perplexity of the demo model on held-out text, per format of KV, on this machine.

    python benchmarks/kv_formats.py

All formats read the same rows through the real runner, in chunks as a prefill does; every chunk attends over what the
ones before it left in blocks. Prints a table: perplexity per token, its change against unquantized KV in the same
dtype, how often the most likely token is the same, and bytes of KV per token.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

DEMO_MODEL = Path(__file__).resolve().parents[1] / "ops/demo_model"
sys.path.insert(0, str(DEMO_MODEL))

import corpus  # noqa: E402  # of the demo model, which is not a package of the project
import data  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from workers.engine.plan import Row  # noqa: E402
from workers.engine.runner import ModelRunner, RunnerSettings  # noqa: E402

BLOCK_SIZE, CHUNK = 16, 512
FORMATS = [(dtype, kv) for dtype in ("float32", "bfloat16") for kv in ("auto", "int8", "fp8")]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8, help="rows of `length` tokens")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    told = parser.parse_args()
    rows = held_out_rows(told.rows, told.length)
    num_tokens = sum(len(row) - 1 for row in rows)
    print(f"{num_tokens} held-out tokens, rows of {told.length}, chunks of {CHUNK}\n")
    print("| dtype | KV | perplexity | change | same best token | KV bytes per token |")
    print("|---|---|---:|---:|---:|---:|")
    exact: tuple[float, list[int]] = (0.0, [])
    for dtype, kv_dtype in FORMATS:
        runner = ModelRunner(
            RunnerSettings(
                str(DEMO_MODEL / "model"),
                device="cpu",
                dtype=dtype,
                kv_dtype=kv_dtype,
                block_size=BLOCK_SIZE,
                num_blocks=3 + told.length // BLOCK_SIZE,
                num_threads=told.threads,
            )
        )
        nats, best = 0.0, []
        for row in rows:
            logprobs, likely = read(runner, row)
            nats -= math.fsum(logprobs)
            best += likely
        perplexity = math.exp(nats / num_tokens)
        if kv_dtype == "auto":
            exact = (perplexity, best)
        same = sum(a == b for a, b in zip(best, exact[1], strict=True)) / num_tokens
        size = runner.store.shape.bytes_per_block / BLOCK_SIZE
        change = perplexity / exact[0] - 1
        print(
            f"| {dtype} | {kv_dtype} | {perplexity:.4f} | {change:+.3%} | {same:.2%} | {size:.0f} |"
        )


if __name__ == "__main__":
    main()
