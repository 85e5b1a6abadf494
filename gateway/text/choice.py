"""One choice of a request as text: ids in, pieces of text out, cut at stop strings, with each token's position.

The module is pure. Text, stop strings and logprobs stay in step: a token's entry goes out once its text is certain, and
no entry goes out for text that was cut away.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import msgspec

from gateway.text.detokenizer import detokenizer
from gateway.text.stops import StopMatcher, StopStrings
from gateway.text.tokenizer import ModelTokenizer
from workers.protocol.messages import TokenLogprob


class TextRules(msgspec.Struct, frozen=True):
    """The rules by which a request wants its text ended and shown."""

    stops: StopStrings | None = None
    """The stop strings, or None where the request has none."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    marks: frozenset[int] = frozenset()
    """Special tokens that stay in the text in any case, because a parser looks for them."""
    shows_tokens: bool = True
    """Somebody wants to see single tokens: their logprobs or their ids."""
    shows_end: bool = False
    """The token that ended the choice has an entry, too, at the end of the text."""


class TokenEntry(msgspec.Struct, frozen=True):
    token: int
    logprob: TokenLogprob | None
    offset: int
    """The character of the choice's text at which the token begins."""


class Piece(msgspec.Struct, frozen=True):
    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    unshown: tuple[int, ...] = ()
    """Tokens that count and have no entry: those of a stop string, and the one that ended the choice."""


class ChoiceText:
    def __init__(self, tokenizer: ModelTokenizer, rules: TextRules) -> None:
        self._tokens = detokenizer(tokenizer, rules.skip_special_tokens, rules.marks)
        self._stops = None if rules.stops is None else StopMatcher(rules.stops, rules.include_stop)
        self._rules = rules
        self._num_chars = 0
        """The number of characters that the tokens so far have made, held ones included."""
        self._num_out = 0
        self._pending: deque[TokenEntry] = deque()
        self.num_tokens = 0
        """The number of tokens so far, at most up to the one that completed a stop string."""
        self.stop: str | None = None
        self._unshown: list[int] = []
        self._begins = array("q")
        """The character at which each token begins."""

    @property
    def is_cut(self) -> bool:
        """Whether a stop string ended the text and is not shown."""
        return self.stop is not None and not self._rules.include_stop

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Piece:
        """Adds one token. After `stop` is set, push no more."""
        self._pending.append(TokenEntry(token, logprob, self._num_chars))
        self.num_tokens += 1
        self._begins.append(self._num_chars)
        return self._advance(self._tokens.push(token))

    @property
    def is_plain(self) -> bool:
        """Says whether text is all that is wanted of the tokens, so that `extend` may take them."""
        return not self._rules.shows_tokens and self._stops is None

    def extend(self, tokens: Sequence[int]) -> str:
        """Adds tokens of which nobody wants to see more than their text, which it returns. Needs `is_plain`."""
        push, begins, num_chars = self._tokens.push, self._begins, self._num_chars
        text = ""
        for token in tokens:
            begins.append(num_chars)
            piece = push(token)
            num_chars += len(piece)
            text += piece
        self._num_chars = self._num_out = num_chars
        self.num_tokens += len(tokens)
        return text

    def end(self, hidden_token: int = -1, logprob: TokenLogprob | None = None) -> Piece:
        """Ends the choice. `hidden_token` ended it and has no text: it counts, and has an entry where the rules say so."""
        if hidden_token >= 0:
            self.num_tokens += 1
            self._begins.append(self._num_chars)
        piece = self._advance(self._tokens.flush())
        if hidden_token >= 0 and self._rules.shows_end and self.stop is None:
            self._pending.append(TokenEntry(hidden_token, logprob, self._num_chars))
        elif hidden_token >= 0:
            self._unshown.append(hidden_token)
        if self.stop is not None:
            return Piece(piece.text, piece.entries, tuple(self._unshown))
        text = "" if self._stops is None else self._stops.flush()
        self._num_out += len(text)
        entries = [*piece.entries, *self._pending]
        self._pending.clear()
        return Piece(piece.text + text, tuple(entries), tuple(self._unshown))

    def num_begun_in(self, spans: Sequence[tuple[int, int | None]]) -> int:
        """Returns how many tokens begin in ranges of characters, of which the last may be open."""
        ends = ((start, len(self._begins) if end is None else bisect_left(self._begins, end)) for start, end in spans)
        return sum(end - bisect_left(self._begins, start) for start, end in ends)

    def _advance(self, text: str) -> Piece:
        self._num_chars += len(text)
        if self._stops is not None and self.num_tokens >= self._rules.min_tokens:
            out, self.stop = self._stops.push(text)
        else:
            out = text
        self._num_out += len(out)
        ready = self._ready()
        return Piece(out, ready, tuple(self._unshown))

    def _ready(self) -> tuple[TokenEntry, ...]:
        """Returns entries whose whole text is out; at a stop, those that begin before the cut."""
        ready: list[TokenEntry] = []
        while self._pending:
            entry = self._pending[0]
            if self.stop is not None:
                if entry.offset >= self._num_out:
                    self._unshown += [one.token for one in self._pending]
                    self._pending.clear()
                    break
            elif self._end_of_first() > self._num_out:
                break
            ready.append(self._pending.popleft())
        return tuple(ready)

    def _end_of_first(self) -> int:
        return self._pending[1].offset if len(self._pending) > 1 else self._num_chars


def texts_of(tokenizer: ModelTokenizer, tokens: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
    """Returns the text that each token adds, aligned: the pieces concatenate to the whole."""
    tokens_in = detokenizer(tokenizer, skip_special_tokens)
    pieces = [tokens_in.push(token) for token in tokens]
    if pieces:
        pieces[-1] += tokens_in.flush()
    return pieces
