"""P3: words of requests do not fill a gateway's memory."""

from __future__ import annotations

import os
from pathlib import Path

from byte_model import tokenizer_spec

from gateway.text.tokenizer import ModelTokenizer

NUM_WORDS = 8_000
LONG = "x" * 240


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_p3_long_words_that_nobody_sends_again_are_not_kept():
    """Each takes 8 KB in the library's cache: 64 MB of these, were there no bound of ours."""
    tokenizer = ModelTokenizer(tokenizer_spec())
    tokenizer.encode_plain("warm")
    before = resident()
    for number in range(NUM_WORDS):
        tokenizer.encode_plain(f"{number}{LONG}")
    assert resident() - before < 25 << 20
