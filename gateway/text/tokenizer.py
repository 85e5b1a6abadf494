"""Text to ids and back for one model. It knows control tokens, and users' text cannot produce them.

This is how a user's `<|im_end|>` stays text. A template renders to one string in which the model's own control tokens
and a user's look alike, so both are distinguished before and after the rendering:

1. `break_up` puts a marker into every place of a user's string where a control token stands, begins or ends.
2. The template renders; `encode_rendered` then replaces each control token that is still whole (so it came from
   the template) by an alias, takes the markers out, and encodes with a tokenizer that knows only the aliases.

What remains of a user's control token is plain text to that tokenizer, wherever it stood. Marker and aliases are random
per process, so no client can send them. Text without control tokens encodes exactly as it always does.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.text.control import WINDOW_CHARS, ControlTokens
from workers.process.byte_level import BYTE_OF_CHAR
from workers.process.vocabulary_digest import vocabulary_digest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CACHED_WORDS = 1_000
"""The number of words that the library caches. It keeps those that each thread meets first, for good; a long word takes
8 KB. Its own bound is 10,000. Usual words are met early, so a tenth of them is nearly as fast.
"""
MOST_PIECES = 4096
"""The number of pieces that one call joins, which holds the interpreter lock until it has freed them, too."""
_SPARE_TOKENS = 64
"""Tokens that are encoded beyond a cut, because the last ones depend on the text after them."""
# Private-use characters of plane 15: valid Unicode that no tokenizer treats specially.
_PRIVATE = range(0xF0000, 0xFFFFE)


def _nonce() -> str:
    """Returns about 96 random bits as characters."""
    return "".join(chr(_PRIVATE[secrets.randbelow(len(_PRIVATE))]) for _ in range(6))


def count_bytes(text: str) -> int:
    """Counts the bytes of a text in UTF-8, window by window: one call over megabytes would hold the interpreter lock."""
    return sum(len(text[i : i + WINDOW_CHARS].encode()) for i in range(0, len(text), WINDOW_CHARS))


class TooManyTokens(ValueError):
    """The text has too many tokens; `num_tokens` is their number."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class ModelTokenizer:
    """A model's tokenizer, immutable after construction. Encoding is thread-safe and releases the interpreter lock."""

    def __init__(self, spec: dict[str, Any], template_source: str = "", num_rows: int | None = None) -> None:
        """Builds the tokenizer. `spec` is the content of a `tokenizer.json`. The model may have fewer rows than there are
        tokens: ids from `num_rows` on are outside of the vocabulary, and what is written as such an added token is text.
        """
        self.vocabulary = vocabulary_digest(spec)
        """The digest of the tokens and their ids."""
        served = [token for token in spec["added_tokens"] if num_rows is None or token["id"] < num_rows]
        spec = {**spec, "added_tokens": served}
        self._tokenizer = _loaded(spec)
        added = [(token["id"], token["content"], token["special"]) for token in spec["added_tokens"]]
        self.special_ids = frozenset(number for number, _, special in added if special)
        self._skipped: dict[frozenset[int], frozenset[int]] = {}
        """Special tokens without those that are kept, by these: a model keeps its own marks or none."""
        # An unspecial added token is a control token if the template builds with it; others (runs of spaces,
        # HTML tags) are ordinary vocabulary that a user's text may use.
        self.control = tuple(
            text for _, text, special in added if text.strip() and (special or text in template_source)
        )
        self._marker = _nonce()
        self._alias = {text: _nonce() for text in self.control}
        self._renamed = _loaded(_renamed(spec, self._alias))
        self._all = ControlTokens(self.control)
        self._special = ControlTokens([text for _, text, special in added if special and text.strip()])
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        num_tokens = max(vocab.values()) + 1
        self.vocab_size = min(num_tokens, num_rows or num_tokens)
        # A normalizer may shorten text before it is cut into tokens; no usual one by more than this.
        shrink = 4 if spec.get("normalizer") else 1
        self.max_bytes_per_token = shrink * max(len(token.encode()) for token in vocab)
        decoder = spec.get("decoder") or {}
        self.is_byte_level = decoder.get("type") == "ByteLevel" or any(
            part.get("type") == "ByteLevel" for part in decoder.get("decoders", ())
        )

    @classmethod
    def load(cls, directory: Path, template_source: str = "", num_rows: int | None = None) -> ModelTokenizer:
        """Reads a tokenizer. Raises `OSError` or `ValueError` for a directory without a usable `tokenizer.json`."""
        spec = (directory / "tokenizer.json").read_bytes()
        try:
            return cls(json.loads(spec), template_source, num_rows)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"tokenizer.json: {error}") from error

    def count(self, text: str) -> int:
        """Counts the tokens of a plain text."""
        return len(self.encode_plain(text, add_special_tokens=False))

    def id_of(self, text: str) -> int | None:
        """Returns the id of the token that is written so, or None."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def special_of(self, texts: Sequence[str]) -> dict[str, int]:
        """Returns the ids of those of the texts that are special tokens."""
        ids = {text: self.id_of(text) for text in texts}
        return {text: number for text, number in ids.items() if number is not None and number in self.special_ids}

    def skipped(self, kept: frozenset[int]) -> frozenset[int]:
        """Returns the special tokens without those that are kept."""
        if kept not in self._skipped:
            self._skipped[kept] = self.special_ids - kept
        return self._skipped[kept]

    # Users' text, before the template

    def break_up(self, text: str, keep_marks: bool = False) -> str:
        """Returns the string with every control token in it broken, whole ones and halves at its ends. With
        `keep_marks` only special tokens are broken: text that the model itself wrote may hold marks that the template
        looks for.
        """
        tokens = self._special if keep_marks else self._all
        joined: list[str] = []
        pieces: list[str] = []
        start = 0
        for place in tokens.places(text):
            pieces.append(text[start : place + 1])
            start = place + 1
            if len(pieces) == MOST_PIECES:
                joined.append(self._marker.join(pieces))
                pieces.clear()
        pieces.append(text[start:])
        return self._break_ends(self._marker.join([*joined, *pieces]), tokens)

    def _break_ends(self, text: str, tokens: ControlTokens) -> str:
        """Breaks halves at the ends, because they could meet their other half in a neighbouring piece."""
        body = text.rstrip()
        if tokens.begins_in(body):
            text = body + self._marker + text[len(body) :]
        body = text.lstrip()
        if tokens.ends_in(body):
            text = text[: len(text) - len(body)] + self._marker + body
        return text

    # Text to ids

    def encode_rendered(self, rendered: str, most: int | None = None, add_special_tokens: bool = False) -> list[int]:
        """Encodes a rendered template, in which the only whole control tokens are the template's own. With
        `add_special_tokens` the tokenizer's own beginning and end stand around it. Raises `TooManyTokens`.
        """
        pieces: list[str] = []
        start = 0
        for place, text in self._all.tokens(rendered):
            pieces += rendered[start:place], self._alias[text]
            start = place + len(text)
        pieces.append(rendered[start:])
        return self.encode_plain("".join(pieces).replace(self._marker, ""), add_special_tokens, most)

    def encode_plain(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Encodes a user's own text. No control token comes from it, except those that the model always begins with.
        Raises `TooManyTokens`.
        """
        # `encode` is not used: it holds the interpreter lock to its end, which is seconds for megabytes.
        (encoded,) = self._renamed.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoded) > most:
            raise TooManyTokens(len(encoded))  # raised before the ids become Python objects
        ids: list[int] = encoded.ids
        return ids

    def beginning(self, text: str, most: int | None) -> str:
        """Returns a beginning of the text that has `most` tokens or more, so that no more than that is encoded."""
        return text if most is None else text[: (most + _SPARE_TOKENS) * self.max_bytes_per_token]

    def encode_segments(
        self, first: str, second: str | None, most: int | None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """Encodes one or two texts as the model joins them. Returns the ids and the segment of each, 0 or 1. With `most`
        the texts, the second one first, are cut so that they fit together with the model's own tokens.
        """
        texts = [self.beginning(text, most) for text in (first, second) if text is not None]
        parts = self._renamed.encode_batch_fast(texts, add_special_tokens=False)
        if most is not None:
            room = most - (self._renamed.num_special_tokens_to_add(second is not None) if add_special_tokens else 0)
            for index, part in reversed(list(enumerate(parts))):
                part.truncate(max(0, room - sum(map(len, parts[:index]))))
        joined = self._renamed.post_process(parts[0], parts[1] if len(parts) > 1 else None, add_special_tokens)
        return joined.ids, joined.type_ids

    # Ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_long(self, ids: Sequence[int]) -> str:
        """Decodes ids including special tokens, without the interpreter lock; for a thread."""
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token adds to the text, half characters included. Unknown ids add nothing."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            mapped = [BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace("▁", " ").encode()

    @cached_property
    def whole_texts(self) -> WholeTexts:
        return WholeTexts(self)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """The ids of byte-fallback tokens: their text is known only when their run has ended."""
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        return frozenset(number for token, number in vocab.items() if _BYTE_TOKEN.fullmatch(token))


class WholeTexts(dict[int, str | None]):
    """The texts of those tokens of a byte-level vocabulary that are whole characters, which is nearly all; None for the
    others. A token's text is made once, when it is first asked for.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self._tokenizer.vocab_size:
            self[token_id] = text
        return text


def _renamed(spec: dict[str, Any], alias: dict[str, str]) -> dict[str, Any]:
    """Returns the same tokenizer with other texts for its control tokens; ids stay."""
    renamed: dict[str, Any] = json.loads(json.dumps(spec))
    for token in renamed["added_tokens"]:
        if token["content"] in alias:
            token["content"] = alias[token["content"]]
            token["normalized"] = False  # matched exactly as written
    model = renamed["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {alias.get(text, text): number for text, number in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[alias.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in alias:
        model["unk_token"] = alias[model["unk_token"]]
    return renamed


def _loaded(spec: dict[str, Any]) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(spec))
    resize = getattr(tokenizer.model, "_resize_cache", None)  # only some kinds of model have a cache
    if resize is not None:
        resize(CACHED_WORDS)
    return tokenizer
