"""Print what the shipped model writes, greedy and sampled, as Markdown for the model card.

    python ops/demo_model/samples.py [--models FOLDER] [--seed 1]

Every output is the first one drawn with the given seed; nothing is picked by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent

CHATS = [
    [("user", "Hello!")],
    [("user", "What does `json.dumps` do?")],
    [("user", "Show me the source of `textwrap.dedent`.")],
    [("user", "What is the module `queue` for?")],
    [("system", "Answer briefly."), ("user", "What does `shutil.copyfile` do?")],
    # These are from held-out files: the model has never read them.
    [("user", "What does `secrets.token_hex` do?")],
    [("user", "Show me the source of `sched.scheduler.cancel`.")],
]
TEXTS = ["def read_lines(path):\n", "class Stack:\n", "import os\nimport sys\n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=HERE, help="the folder of model/ and draft/")
    parser.add_argument("--name", default="model", choices=["model", "draft"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    folder = args.models / args.name
    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [
        tok.apply_chat_template(
            [{"role": role, "content": content} for role, content in chat], tokenize=False, add_generation_prompt=True
        )
        for chat in CHATS
    ]
    settings: dict[str, dict[str, float]] = {
        "greedy": {"do_sample": False},
        "temperature 0.7, top-p 0.95": {"do_sample": True, "temperature": 0.7, "top_p": 0.95},
    }
    for prompt in [*prompts, *(tok.bos_token + text for text in TEXTS)]:
        shown = prompt.removeprefix(tok.bos_token).rstrip("\n")
        print(f"Prompt:\n\n~~~text\n{shown}\n~~~\n")
        inputs = tok(prompt, add_special_tokens=False, return_tensors="pt")
        for name, setting in settings.items():
            torch.manual_seed(args.seed)
            output = model.generate(**inputs, max_new_tokens=args.tokens, **setting)[0]
            text = tok.decode(output[inputs["input_ids"].shape[1] :])
            print(f"Output, {name}:\n\n~~~text\n{text}\n~~~\n")


if __name__ == "__main__":
    main()
