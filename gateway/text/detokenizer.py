"""Turns ids to text, token by token, without ever splitting or losing a character.

The pieces of a sequence concatenate to the tokenizer's decoding of the whole. There are two ways, depending on the
vocabulary: bytes through an incremental UTF-8 decoder, or a window that is decoded again while its end is not certain.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from gateway.text.tokenizer import ModelTokenizer


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Returns the text that is certain now; it is often empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Returns the text that was held back, at the end."""
        ...


def detokenizer(
    tokenizer: ModelTokenizer, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
) -> Detokenizer:
    """Returns a detokenizer that skips special tokens, if it is to, except the `kept` ones."""
    kind = ByteLevelDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, tokenizer.skipped(kept) if skip_special_tokens else frozenset())


class ByteLevelDetokenizer:
    def __init__(self, tokenizer: ModelTokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts = tokenizer.whole_texts
        self._is_open = False
        """The bytes so far end within a character."""

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        if not self._is_open and (text := self._texts[token_id]) is not None:
            return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._is_open = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """A detokenizer for decoders that look at neighbours (SentencePiece: leading space, runs of byte tokens).

    The window is [settled tokens that give context | tokens whose text is still open].
    """

    def __init__(self, tokenizer: ModelTokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._window: list[int] = []
        self._num_settled = 0
        self._settled_text = ""

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_token_ids:
            return ""  # the run of byte tokens may still become another character
        return self._settle()

    def flush(self) -> str:
        return self._settle()

    def _settle(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        piece = text[len(self._settled_text) :]
        if self._settled_text:
            # The open tokens become the context of the next ones.
            self._window = self._window[self._num_settled :] or self._window
            text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        self._num_settled = len(self._window)
        self._settled_text = text
        return piece
