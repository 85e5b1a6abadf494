"""Signatures of thoughts, which clients of Messages keep and send back with the thought's block. The module is pure.

A signature is not checked, because a thought that was changed is no more than a text of the client's. Where the client
wanted the thought left out, the signature carries it: so the model gets it back, and the cache finds the prompt.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode

SHOWN = "hg1."
"""The begin of the signature of a thought that is shown. A digest follows."""
LEFT_OUT = "hg2."
"""The begin of the signature of a thought that is left out. The thought follows."""


def signature_of(thought: str, *, is_shown: bool) -> str:
    if is_shown:
        return SHOWN + b64encode(hashlib.blake2b(thought.encode(), digest_size=24).digest()).decode()
    return LEFT_OUT + b64encode(thought.encode()).decode()


def thought_in(signature: str) -> str:
    """Returns the thought that a signature carries, or nothing. Raises `ValueError` for one that was changed."""
    if not signature.startswith(LEFT_OUT):
        return ""
    return b64decode(signature.removeprefix(LEFT_OUT), validate=True).decode()
