"""This measures what each lossy option costs in quality, on this machine: the demo model on held-out text, and random
weights.

    python benchmarks/quality.py [--write docs/quality.md] [--json FILE]

All options read the same rows through the real runner, in chunks as a prefill does; every chunk attends over what the
ones before it left in blocks. Of the demo model: perplexity per token, its change against nothing rounded in the same
dtype, how often the most likely token is the same, and bytes of KV per token. Of random weights, where no text is more
likely than another: the divergence of each next token's distribution from that of float32 with nothing rounded. Nothing
here is a time. `--write` puts the tables between the marks of a page. Smoothing has its statistics from `headgate
calibrate`: of the demo model over text it was trained on, of random weights over what the model writes itself.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

DEMO_MODEL = Path(__file__).resolve().parents[1] / "ops/demo_model"
sys.path.insert(0, str(DEMO_MODEL))

import corpus  # of the demo model, which is not a package of the project
import data
from tokenizers import Tokenizer

from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.sparsity.budget import OBSERVE_EVERY, OBSERVED_TOKENS, Policy, Sparsity, received
from workers.engine.values.layout import Thinned
from workers.engine.values.plan import Row
from workers.engine.values.probe import AttentionMass
from workers.protocol.messages import TokenLogprob

BLOCK_SIZE, CHUNK = 16, 512
CALIBRATION_TOKENS = 4096
MARKS = ("<!-- measured -->", "<!-- /measured -->")
RANDOM = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.09,
}
"""`initializer_range`: attention scores and logits then have a spread of about 2 and 1.4, neither flat nor all on one
token."""
RANDOM_MODELS = {
    "Llama": lambda: transformers.LlamaConfig(**RANDOM),
    "Mixtral": lambda: transformers.MixtralConfig(**RANDOM, num_local_experts=8, num_experts_per_tok=2),
}
RANDOM_LENGTH, NUM_RANDOM_ROWS = 512, 2


@dataclass(frozen=True)
class Option:
    kv: str = "auto"
    weights: str = "none"
    smoothed: bool = False
    policy: Policy | None = None
    share: int = 0
    """One in so many tokens of a row is in the KV budget."""

    @property
    def cache(self) -> str:
        return f"1/{self.share} {self.policy}" if self.policy else self.kv

    @property
    def rounding(self) -> str:
        return f"{self.weights}, smoothed" if self.smoothed else self.weights


EXACT = Option()
OPTIONS = [
    EXACT,
    Option("int8"),
    Option("fp8"),
    Option(weights="int8"),
    Option(weights="fp8"),
    Option(weights="int4"),
    Option(weights="w8a8"),
    Option(weights="w8a8", smoothed=True),
    Option(weights="llm_int8"),
    Option("int8", "int8"),
    Option("int8", "int4"),
    Option(policy="heavy", share=2),
    Option(policy="recent", share=2),
    Option(policy="heavy", share=4),
    Option(policy="recent", share=4),
]
"""The first is what the others are compared with."""


@dataclass(frozen=True)
class Model:
    directory: Path
    rows: list[list[int]]
    statistics: Path | None

    @property
    def options(self) -> list[Option]:
        return [one for one in OPTIONS if self.statistics is not None or not one.smoothed]

    def start(self, option: Option, dtype: str, threads: int) -> ModelRunner:
        return ModelRunner(
            RunnerSettings(
                str(self.directory),
                device="cpu",
                dtype=dtype,
                kv_dtype=option.kv,
                quant=option.weights,
                smoothing=self.statistics if option.smoothed else None,
                block_size=BLOCK_SIZE,
                num_blocks=3 + max(map(len, self.rows)) // BLOCK_SIZE,
                num_threads=threads,
                sparse=option.policy is not None,
            )
        )


def read(runner: ModelRunner, row: list[int], num_top: int, option: Option) -> Iterator[TokenLogprob]:
    """Yields the log-probability of each token behind the first, with the most likely tokens in its place."""
    if option.policy is not None:
        yield from read_within(runner, row, num_top, option.policy, len(row) // option.share)
        return
    table = list(range(1, 2 + len(row) // BLOCK_SIZE))
    for start in range(0, len(row) - 1, CHUNK):
        end = min(start + CHUNK, len(row) - 1)
        part = Row(row[start:end], start, table, prompt_logprobs=num_top, next_token=row[end])
        (result,) = runner.execute([part])
        yield from result.prompt_logprobs


def read_within(
    runner: ModelRunner, row: list[int], num_top: int, policy: Policy, budget: int
) -> Iterator[TokenLogprob]:
    """The budget's tokens as a prompt, then block by block as if each token were drawn: before each block one goes, and
    as many queries measure as a decode has in so many tokens."""
    sparsity = Sparsity(policy, budget // BLOCK_SIZE, BLOCK_SIZE)
    table = list(range(1, 1 + sparsity.num_blocks))
    start, end, mass, num_dropped = 0, budget, [0.0] * len(table), 0
    while start < len(row) - 1:
        number = min(end - start, OBSERVED_TOKENS if start == 0 else BLOCK_SIZE // OBSERVE_EVERY)
        told = {
            "prompt_logprobs": num_top,
            "next_token": row[end],
            "layout": Thinned(num_dropped) if num_dropped else None,
        }
        (result,) = runner.execute([Row(row[start:end], start, table, probe=AttentionMass(number), **told)])
        yield from result.prompt_logprobs
        mass = received(mass, result.probed)
        kept = sparsity.kept(mass if policy == "heavy" else [], len(table), len(table) - 1)
        (gone,) = set(range(len(table))) - set(kept)
        table = [*(table[index] for index in kept), table[gone]]
        mass = [*(mass[index] for index in kept), 0.0]
        start, end = end, min(end + BLOCK_SIZE, len(row) - 1)
        num_dropped += BLOCK_SIZE


# --- the demo model ---


@dataclass(frozen=True)
class Perplexity:
    dtype: str
    option: Option
    perplexity: float
    change: float
    same: float
    """Share of places whose most likely token is the one of nothing rounded."""
    kv_bytes: float
    """Per token."""

    def line(self) -> str:
        told = self.option
        return (
            f"| {self.dtype} | {told.cache} | {told.rounding} | {self.perplexity:.4f} "
            f"| {self.change:+.3%} | {self.same:.2%} | {self.kv_bytes:.0f} |"
        )


def demo_model(scratch: Path, num_rows: int, length: int) -> Model:
    """Rows are cut as by `ops/demo_model/evaluate.py`, every other one of documents and of conversations."""
    directory = DEMO_MODEL / "model"
    tok = Tokenizer.from_file(str(directory / "tokenizer.json"))
    docs = data.documents()
    texts = corpus.encode_documents(tok, [doc.text for doc in docs if doc.held_out])
    talks = corpus.encode_conversations(tok, corpus.render(1, docs, held_out=True))
    pairs = zip(*(corpus.held_out_rows(found, length) for found in (texts, talks)), strict=False)
    rows = [row.tolist() for pair in pairs for row in pair]
    text = scratch / "calibration.txt"
    text.write_text("\n\n".join(doc.text for doc in docs if not doc.held_out), encoding="utf-8")
    statistics = calibrate(directory, scratch / "demo.safetensors", ["--text", str(text)])
    return Model(directory, rows[:num_rows], statistics)


def perplexities(model: Model, threads: int) -> Iterator[Perplexity]:
    num_tokens = sum(len(row) - 1 for row in model.rows)
    for dtype in ("float32", "bfloat16"):
        exact_nats, exact_best = 0.0, []
        for option in model.options:
            runner = model.start(option, dtype, threads)
            found = [token for row in model.rows for token in read(runner, row, 1, option)]
            nats = -math.fsum(token.logprob for token in found)
            best = [token.top[0].token for token in found]
            if option == EXACT:
                exact_nats, exact_best = nats, best
            yield Perplexity(
                dtype,
                option,
                math.exp(nats / num_tokens),
                math.exp((nats - exact_nats) / num_tokens) - 1,
                sum(a == b for a, b in zip(best, exact_best, strict=True)) / num_tokens,
                runner.store.shape.bytes_per_block / BLOCK_SIZE,
            )


# --- random weights ---


@dataclass(frozen=True)
class Divergence:
    model: str
    option: Option
    mean: float
    """Nats, of Kullback and Leibler, from float32 with nothing rounded."""
    largest: float
    logits: float
    """Root mean square difference of logits, each place's moved to mean 0, relative to their spread."""

    def line(self) -> str:
        told = self.option
        return (
            f"| {self.model} | {told.cache} | {told.rounding} | {self.mean:.2e} "
            f"| {self.largest:.2e} | {self.logits:.2%} |"
        )


def random_model(scratch: Path, name: str) -> Model:
    """Statistics are of layers that can be smoothed: a Mixtral has none."""
    directory = scratch / name
    torch.manual_seed(0)
    config = RANDOM_MODELS[name]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    generator = random.Random(0)
    rows = [generator.choices(range(3, RANDOM["vocab_size"]), k=RANDOM_LENGTH) for _ in range(NUM_RANDOM_ROWS)]
    smooth = name == "Llama"
    statistics = calibrate(directory, scratch / "random.safetensors") if smooth else None
    return Model(directory, rows, statistics)


def divergences(name: str, model: Model, threads: int) -> Iterator[Divergence]:
    exact = torch.empty(0)
    for option in model.options:
        runner = model.start(option, "float32", threads)
        found = torch.cat([distributions(runner, row, option) for row in model.rows])
        if option == EXACT:
            exact = found
        each = (exact.exp() * (exact - found)).sum(-1)
        off, spread = (part - part.mean(-1, keepdim=True) for part in (found - exact, exact))
        yield Divergence(
            name,
            option,
            each.mean().item(),
            each.max().item(),
            (off.square().mean() / spread.square().mean()).sqrt().item(),
        )


def distributions(runner: ModelRunner, row: list[int], option: Option) -> torch.Tensor:
    """Returns log-probabilities `[tokens - 1, vocabulary]`, float64."""
    found = torch.empty((len(row) - 1, runner.vocab_size), dtype=torch.float64)
    for place, token in enumerate(read(runner, row, runner.vocab_size, option)):
        ids = torch.tensor([top.token for top in token.top])
        found[place, ids] = torch.tensor([top.logprob for top in token.top], dtype=torch.float64)
    return found


# --- tables ---


def calibrate(model: Path, out: Path, text: list[str] | None = None) -> Path:
    command = [str(Path(sys.executable).parent / "headgate"), "calibrate", str(model)]
    told = ["--out", str(out), "--tokens", str(CALIBRATION_TOKENS), *(text or [])]
    subprocess.run([*command, *told], check=True)
    return out


def tables(scratch: Path, told: argparse.Namespace, say: Callable[[str], None]) -> dict[str, list[dict[str, object]]]:
    model = demo_model(scratch, told.rows, told.length)
    num_tokens = sum(len(row) - 1 for row in model.rows)
    say(f"The demo model: {num_tokens:,} held-out tokens in {len(model.rows)} rows.\n")
    say("| dtype | KV | weights | perplexity | change | same best token | KV bytes per token |")
    say("|---|---|---|---:|---:|---:|---:|")
    demo, drawn = [], []
    for found in perplexities(model, told.threads):
        say(found.line())
        demo.append(asdict(found))
    say(f"\nRandom weights, float32: {NUM_RANDOM_ROWS} rows of {RANDOM_LENGTH} tokens.\n")
    say("| model | KV | weights | mean divergence | largest | difference of logits |")
    say("|---|---|---|---:|---:|---:|")
    for name in RANDOM_MODELS:
        for each in divergences(name, random_model(scratch, name), told.threads):
            say(each.line())
            drawn.append(asdict(each))
    return {"demo": demo, "random": drawn}


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
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory() as scratch:
        found = tables(Path(scratch), told, say)
    if told.write:
        write(told.write, lines)
    if told.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        machine |= {"torch": torch.__version__}
        held = {"rows": told.rows, "length": told.length}
        told.json.write_text(json.dumps({"machine": machine, "text": held, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
