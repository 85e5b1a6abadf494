"""Train the demo model and its draft on the Python standard library.

    python ops/demo_model/train.py                       # about an hour on 2 cores
    python ops/demo_model/train.py --steps 2000 --draft-steps 1200   # reproducible by seed

It writes `model/`, `draft/` (complete Hugging Face folders) and `training_log.json`. The learning rate follows the
share of the budget that is used up, time with `--minutes` and steps with `--steps`, so a busy machine costs quality and
never leaves a schedule unfinished. The script knows nothing of the engine that will serve the result.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import corpus
import data
import export
import numpy as np
import tokenizer as demo_tokenizer
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Recipe:
    """The parameters of a training run, except for the corpus and the budget."""

    tokens_per_step: int = 4096
    # Row lengths, and the progress each begins at: short rows are cheap, and the last share of
    # the budget reaches every position of the context.
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.4, 512), (0.85, 2048))
    conversation_share: float = 0.45
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    weight_decay: float = 0.05
    warmup: float = 0.02
    clip: float = 1.0


class Budget:
    """Progress from 0 to 1, by steps if they are given and by the clock otherwise."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self._seconds = minutes * 60
        self._steps = steps
        self._start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def progress(self, step: int) -> float:
        if self._steps is not None:
            return step / self._steps
        return self.elapsed() / self._seconds


def rate(progress: float, warmup: float) -> float:
    """Returns the learning rate: linear warm-up, then half a cosine to zero."""
    if progress < warmup:
        return max(progress, 0.02 * warmup) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def loss_of(model: LlamaForCausalLM, batch: np.ndarray) -> torch.Tensor:
    """Returns the mean cross entropy of the next token over all positions of the batch."""
    ids = torch.from_numpy(batch)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        logits = functional.linear(hidden, model.lm_head.weight)
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: list[np.ndarray]) -> float:
    """Nats per token over the given rows, weighted by their tokens."""
    model.eval()
    total = sum(loss_of(model, row[None]).item() * (len(row) - 1) for row in rows)
    model.train()
    return total / sum(len(row) - 1 for row in rows)


def train_one(
    name: str,
    batches: corpus.Batches,
    held_out: list[np.ndarray],
    recipe: Recipe,
    args: argparse.Namespace,
    tok: Tokenizer,
) -> dict[str, object]:
    """Trains one of the two models, exports it, and returns its part of the log."""
    minutes, steps = (args.minutes, args.steps) if name == "model" else (args.draft_minutes, args.draft_steps)
    torch.manual_seed(args.seed)
    if args.resume:
        model = LlamaForCausalLM.from_pretrained(args.out / name, dtype=torch.float32).train()
    else:
        model = LlamaForCausalLM(export.config(name)).train()
    parameters = sum(p.numel() for p in model.parameters())
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "layers" not in n]
    # Muon makes the steps of matrices orthogonal, and reaches a loss in clearly fewer of them than AdamW.
    muon = torch.optim.Muon(matrices, weight_decay=recipe.weight_decay, adjust_lr_fn="original")
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [(muon, recipe.muon_rate), (adam, recipe.adam_rate)]
    print(f"{name}: {parameters:,} parameters, {steps or f'{minutes} minutes'}", flush=True)

    budget = Budget(minutes, steps)
    entries: list[dict[str, float]] = []
    running: list[float] = []
    seen, step, reported, exported = 0, 0, -math.inf, 0.0
    while (progress := budget.progress(step)) < 1:
        batch = batches.next(max(row for begin, row in recipe.lengths if progress >= begin))
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, recipe.clip)
        factor = args.peak * rate(progress, recipe.warmup)
        for optimizer, its_rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * its_rate
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step += 1
        seen += batch.shape[0] * (batch.shape[1] - 1)
        running.append(loss.item())
        if budget.elapsed() - reported > args.report_seconds:
            reported = budget.elapsed()
            entries.append(_entry(step, seen, budget, running, held_out_loss(model, held_out)))
            print(name, json.dumps(entries[-1]), flush=True)
            running = []
        if budget.elapsed() - exported > args.export_minutes * 60:
            exported = budget.elapsed()
            export.save(model, tok, args.out / name)
    entries.append(_entry(step, seen, budget, running, held_out_loss(model, held_out)))
    print(name, json.dumps(entries[-1]), flush=True)
    export.save(model, tok, args.out / name)
    return {
        "parameters": parameters,
        "steps": step,
        "tokens": seen,
        "seconds": round(budget.elapsed(), 1),
        "budget": {"minutes": minutes} if steps is None else {"steps": steps},
        "resumed": args.resume,
        "peak": args.peak,
        "recipe": asdict(recipe),
        "entries": entries,
    }


def _entry(step: int, seen: int, budget: Budget, losses: list[float], held_out: float) -> dict[str, float]:
    return {
        "step": step,
        "tokens": seen,
        "seconds": round(budget.elapsed(), 1),
        "train_loss": round(sum(losses) / max(1, len(losses)), 4),
        "held_out_loss": round(held_out, 4),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="where model/ and draft/ are written")
    parser.add_argument("--only", choices=["model", "draft"], help="train one of the two")
    parser.add_argument("--resume", action="store_true", help="start from the weights in --out, with a new schedule")
    parser.add_argument("--peak", type=float, default=1.0, help="scales the learning rates; with --resume below 1")
    parser.add_argument("--minutes", type=float, default=52)
    parser.add_argument("--draft-minutes", type=float, default=11)
    parser.add_argument("--steps", type=int, help="a budget of steps instead of minutes")
    parser.add_argument("--draft-steps", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report-seconds", type=float, default=120)
    parser.add_argument("--export-minutes", type=float, default=5)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    docs = data.documents()
    train_texts = [d.text for d in docs if not d.held_out]
    train_chats = corpus.render(args.seed, docs, held_out=False)
    if args.resume or args.only == "draft":  # the ids of the model that exists
        tok = Tokenizer.from_file(str(args.out / "model" / "tokenizer.json"))
    else:
        tok = demo_tokenizer.train([*train_texts, *train_chats])

    documents = corpus.encode_documents(tok, train_texts)
    chats = corpus.encode_conversations(tok, train_chats)
    held_documents = corpus.encode_documents(tok, [d.text for d in docs if d.held_out])
    held_chats = corpus.encode_conversations(tok, corpus.render(args.seed, docs, held_out=True))
    # During training a fixed sample is enough; evaluate.py reads the held-out side in full.
    sample = [*corpus.held_out_rows(held_documents, 512)[::5], *corpus.held_out_rows(held_chats, 512)[::10]]
    log_file = args.out / "training_log.json"
    keep = (args.only or args.resume) and log_file.exists()
    log = json.loads(log_file.read_text(encoding="utf-8")) if keep else {}
    log |= {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": args.threads,
        "seed": args.seed,
        "corpus": {
            "files": len(docs),
            "held_out_files": sum(d.held_out for d in docs),
            "train_document_tokens": sum(map(len, documents)),
            "train_conversations": len(chats),
            "train_conversation_tokens": sum(map(len, chats)),
            "held_out_document_tokens": sum(map(len, held_documents)),
            "held_out_conversations": len(held_chats),
            "held_out_conversation_tokens": sum(map(len, held_chats)),
            "held_out_sample_tokens": sum(len(row) - 1 for row in sample),
        },
    }
    print(json.dumps(log["corpus"]), flush=True)
    recipe = Recipe()
    for name in ("model", "draft"):
        if args.only in (None, name):
            batches = corpus.Batches(
                documents,
                chats,
                tokens=recipe.tokens_per_step,
                conversation_share=recipe.conversation_share,
                seed=args.seed + 1000 * args.resume,  # not the same rows again
            )
            run = train_one(name, batches, sample, recipe, args, tok)
            log[name] = [*log.get(name, []), run] if args.resume else [run]
            log_file.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
