"""The text of each token id as bytes, read from a model's `tokenizer.json`. An automaton over bytes needs it.

There are two kinds of vocabularies: GPT-2's, which writes each byte as a printable character, and SentencePiece's, with
`▁` for a space and `<0x0A>` for a byte. A special token is no text: a grammar allows it only where it names its id.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from workers.process.byte_level import BYTE_OF_CHAR

SPECIAL = b"\xff"
"""The library's sign of a special token, in front of its name. No text in UTF-8 has this byte."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read(directory: Path, vocab_size: int) -> list[bytes]:
    """Returns one entry per id below `vocab_size`. It is empty where there is no text."""
    spec: dict[str, Any] = json.loads((directory / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    byte_of = BYTE_OF_CHAR if _is_byte_level(spec.get("decoder") or {}) else None
    special = {token["id"] for token in spec.get("added_tokens", []) if token["special"]}
    vocabulary = [b""] * vocab_size
    for text, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number < vocab_size:
            vocabulary[number] = SPECIAL + text.encode() if number in special else _text(text, byte_of)
    return vocabulary


def _text(token: str, byte_of: dict[str, int] | None) -> bytes:
    if byte_of is not None:
        known = [byte_of[char] for char in token if char in byte_of]
        return bytes(known) if len(known) == len(token) else token.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    parts = [decoder, *decoder.get("decoders", ())]
    return any(part.get("type") == "ByteLevel" for part in parts)
