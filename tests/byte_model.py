"""A model directory without weights: the byte tokenizer of `fakes.ScriptedWorker`, with a chat template.

Ids 0-255 are bytes, 256-258 the control tokens `<|bos|>`, `<|eos|>` and `<|pad|>`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.process.byte_level import BYTE_OF_CHAR

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CONTROL = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258}


def tokenizer_spec() -> dict[str, Any]:
    vocab = BYTE_OF_CHAR | CONTROL
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, number in CONTROL.items()
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None},
    }


def write_byte_model(directory: Path, max_model_len: int = 2048, template: str = TEMPLATE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_spec()))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": max_model_len}))
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def chat_text(messages: list[dict[str, str]]) -> str:
    """Returns what the template makes of plain messages, for computing what a worker must answer."""
    turns = "".join(f"{m['role']}: {m['content']}<|eos|>\n" for m in messages)
    return f"<|bos|>{turns}assistant:"
