"""A digest of a model's vocabulary. A gateway and a worker with equal ones mean the same tokens by the same ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any


def vocabulary_digest(spec: Mapping[str, Any]) -> str:
    """Returns the digest of the tokens and ids of a `tokenizer.json`, or "" without any. The rules by which it cuts text
    do not count, nor does the order in which it is written.
    """
    vocab = spec.get("model", {}).get("vocab")
    if not vocab:
        return ""
    if isinstance(vocab, dict):
        vocab = sorted(vocab.items(), key=itemgetter(1))  # files are in this order, so it is soon done
    added = sorted((token["id"], token["content"]) for token in spec.get("added_tokens", ()))
    return hashlib.blake2b(json.dumps([vocab, added]).encode(), digest_size=8).hexdigest()
