"""The corpus as token ids, and the endless stream of training rows drawn from it.

The module knows how documents and conversations are laid out in a row of fixed length. It knows nothing of the model
that reads the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import data
import numpy as np
import tokenizer as demo_tokenizer
from tokenizers import Tokenizer

Ids = np.ndarray


def render(seed: int, docs: list[data.Document], *, held_out: bool) -> list[str]:
    """Returns every conversation of one side of the split, through the chat template."""
    template = demo_tokenizer.renderer()
    made = data.conversations(docs, seed, held_out=held_out)
    return [template.render(messages=conversation) for conversation in made]


def encode_documents(tok: Tokenizer, texts: list[str]) -> list[Ids]:
    """Returns the ids of source texts, with their begin and end marked."""
    bos, eos = tok.token_to_id(demo_tokenizer.BOS), tok.token_to_id(demo_tokenizer.EOS)
    return [np.array([bos, *e.ids, eos], dtype=np.int64) for e in tok.encode_batch(texts)]


def encode_conversations(tok: Tokenizer, texts: list[str]) -> list[Ids]:
    """Returns the ids of conversations. Their marks are part of the template's own text."""
    return [np.array(e.ids, dtype=np.int64) for e in tok.encode_batch(texts)]


def document_rows(documents: list[Ids], length: int, rng: np.random.Generator) -> Iterator[Ids]:
    """Rows of `length + 1` ids: all documents in one stream, cut anew every epoch."""
    while True:
        order = rng.permutation(len(documents))
        stream = np.concatenate([documents[i] for i in order])
        starts = np.arange(rng.integers(length), len(stream) - length, length)
        rng.shuffle(starts)
        for start in starts:
            yield stream[start : start + length + 1]


def conversation_rows(conversations: list[Ids], length: int, rng: np.random.Generator) -> Iterator[Ids]:
    """Rows of `length + 1` ids that begin with a conversation.

    The conversation that the end of a row cuts begins the next row, if it fits a row at all.
    """
    row: list[Ids] = []
    size = 0
    while True:
        for i in rng.permutation(len(conversations)):
            row.append(conversations[i])
            size += len(conversations[i])
            if size > length:
                yield np.concatenate(row)[: length + 1]
                fits = len(conversations[i]) <= length and size > length + 1
                row = [conversations[i]] if fits else []
                size = len(conversations[i]) if fits else 0


class Batches:
    """Batches of rows. Documents and conversations are mixed by a fixed share."""

    def __init__(
        self, documents: list[Ids], conversations: list[Ids], *, tokens: int, conversation_share: float, seed: int
    ) -> None:
        self._documents = documents
        self._conversations = conversations
        self._tokens = tokens
        self._share = conversation_share
        self._rng = np.random.default_rng(seed)
        self._length = 0
        self._rows: tuple[Iterator[Ids], Iterator[Ids]] | None = None

    def next(self, length: int) -> Ids:
        """Returns a batch of shape (rows, length + 1); a new length starts new streams."""
        if self._rows is None or length != self._length:
            self._length = length
            self._rows = (
                document_rows(self._documents, length, self._rng),
                conversation_rows(self._conversations, length, self._rng),
            )
        batch = []
        for _ in range(max(1, self._tokens // length)):
            source = self._rows[int(self._rng.random() < self._share)]
            batch.append(next(source))
        return np.stack(batch)


def held_out_rows(sequences: list[Ids], length: int) -> list[Ids]:
    """Returns the held-out side in order, in rows of at most `length` predicted tokens, none left out.

    Rows overlap by one id, so every token but the first is predicted exactly once.
    """
    stream = np.concatenate(sequences)
    rows = [stream[i : i + length + 1] for i in range(0, len(stream) - 1, length)]
    return [row for row in rows if len(row) > 1]
