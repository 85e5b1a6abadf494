"""Held-out perplexity of the shipped models against a unigram baseline.

    python ops/demo_model/evaluate.py

It reads the weights as they are on disk and the held-out side of the split in full; it writes `evaluation.json` and
prints a table. The baseline knows only how often each token occurs in the training text of the same kind. For
speculative decoding it also measures how often the draft's next token would be the model's. It knows nothing of how the
models were trained.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from pathlib import Path

import corpus
import data
import numpy as np
import tokenizer as demo_tokenizer
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

HERE = Path(__file__).resolve().parent


def unigram_nats(train: list[np.ndarray], held_out: list[np.ndarray]) -> float:
    """Nats of all predicted tokens, with counts smoothed by one."""
    counts = np.bincount(np.concatenate(train), minlength=demo_tokenizer.VOCABULARY) + 1.0
    log_shares = np.log(counts / counts.sum())
    return float(-log_shares[np.concatenate(held_out)[1:]].sum())


@torch.inference_mode()
def read(models: dict[str, LlamaForCausalLM], rows: list[np.ndarray]) -> tuple[dict[str, float], dict[str, float]]:
    """Nats of all predicted tokens for each model, and how well the draft agrees with the model."""
    nats = dict.fromkeys(models, 0.0)
    same = overlap = tokens = 0.0
    for row in rows:
        ids = torch.from_numpy(row)
        logs = {
            name: torch.log_softmax(model(ids[None, :-1]).logits[0].float(), dim=-1) for name, model in models.items()
        }
        for name, log in logs.items():
            nats[name] -= log.gather(1, ids[1:, None]).sum().item()
        same += (logs["model"].argmax(-1) == logs["draft"].argmax(-1)).sum().item()
        overlap += torch.minimum(logs["model"], logs["draft"]).exp().sum().item()
        tokens += len(row) - 1
    return nats, {"greedy": same / tokens, "sampled": overlap / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=HERE, help="the folder of model/ and draft/")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the training")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tok = Tokenizer.from_file(str(args.models / "model" / "tokenizer.json"))
    models = {
        name: AutoModelForCausalLM.from_pretrained(args.models / name, dtype=torch.float32).eval()
        for name in ("model", "draft")
    }
    docs = data.documents()
    texts = {
        "documents": [[d.text for d in docs if d.held_out == side] for side in (False, True)],
        "conversations": [corpus.render(args.seed, docs, held_out=side) for side in (False, True)],
    }
    encoders = {"documents": corpus.encode_documents, "conversations": corpus.encode_conversations}
    report: dict[str, object] = {"python": platform.python_version(), "context": 2048}
    print("| held-out text | predictor | nats/token | perplexity/token | bits/byte | perplexity/byte |")
    print("|---|---|---:|---:|---:|---:|")
    for kind, (train_texts, held_texts) in texts.items():
        train, held = encoders[kind](tok, train_texts), encoders[kind](tok, held_texts)
        size = sum(len(text.encode()) for text in held_texts)
        tokens = sum(map(len, held)) - 1
        nats, agreement = read(models, corpus.held_out_rows(held, demo_tokenizer.MAX_LENGTH))
        nats["unigram"] = unigram_nats(train, held)
        part: dict[str, object] = {"tokens": tokens, "bytes": size, "draft_agreement": agreement}
        for name, total in nats.items():
            per_token, per_byte = total / tokens, total / size
            figures = {
                "nats_per_token": round(per_token, 4),
                "perplexity_per_token": round(math.exp(per_token), 3),
                "bits_per_byte": round(per_byte / math.log(2), 4),
                "perplexity_per_byte": round(math.exp(per_byte), 4),
            }
            part[name] = figures
            print(f"| {kind} | {name} | " + " | ".join(map(str, figures.values())) + " |")
        report[kind] = part
        print(f"draft agreement on {kind}: {agreement}")
    text = json.dumps(report, indent=1) + "\n"
    (args.models / "evaluation.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
