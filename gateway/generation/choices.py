"""The state of each choice of one engine request, its text, and the selection of those that the client sees."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.parsers.parts import Folded, OutputParser, Part
from gateway.structured.form import Form
from gateway.text.choice import ChoiceText, Piece
from workers.protocol.messages import TokenDelta, TokenLogprob


@dataclass
class Choice:
    text: ChoiceText
    parser: OutputParser
    num_received: int = 0
    output: array[int] = field(default_factory=lambda: array("i"))
    """The ids that were received, for a worker that goes on where this one is lost. Upstreams send none."""
    total_logprob: float = 0.0
    """The sum of the logprobs of the tokens up to the choice's end, if they came with logprobs."""
    finish: str | None = None
    parts: list[Part] = field(default_factory=list)
    """The parts so far. They are kept only where the output must have a form."""

    def take(self, delta: TokenDelta, *, shows_end: bool) -> Piece:
        """Returns the text of new tokens. The token that ended the choice has no text, unless the client wants to see
        it (`shows_end`).
        """
        hidden = -1 if shows_end else delta.stop_token
        if self.text.is_plain and not delta.logprobs:
            return Piece(self._plain_text(delta, hidden))
        pieces: list[Piece] = []
        logprobs: Sequence[TokenLogprob | None] = delta.logprobs or (None,) * len(delta.tokens)
        last = len(delta.tokens) - 1
        for i, (token, logprob) in enumerate(zip(delta.tokens, logprobs, strict=True)):
            self.total_logprob += logprob.logprob if logprob else 0.0
            if i == last and delta.finish == "stop" and token == hidden:
                pieces.append(self.text.end(token, logprob))
            else:
                pieces.append(self.text.push(token, logprob))
            if self.text.stop is not None:
                break
        else:
            if delta.finish is not None:
                pieces.append(self.text.end())
        text = "".join(piece.text for piece in pieces)
        unshown = pieces[-1].unshown if pieces else ()
        return Piece(text, tuple(entry for piece in pieces for entry in piece.entries), unshown)

    def _plain_text(self, delta: TokenDelta, hidden: int) -> str:
        tokens = delta.tokens
        if delta.finish is None:
            return self.text.extend(tokens)
        if delta.finish == "stop" and tokens and tokens[-1] == hidden:
            return self.text.extend(tokens[:-1]) + self.text.end(hidden).text
        return self.text.extend(tokens) + self.text.end().text

    def read(self, text: str, form: Form | None) -> list[Part]:
        """Adds text and returns the parts that are certain now."""
        parts = self.parser.push(text)
        if form is not None:
            self.parts += parts
        return parts

    def read_end(self, form: Form | None) -> list[Part]:
        """Ends the text and returns the last parts."""
        parts = self.parser.end(is_cut=self.finish == "length" or self.text.is_cut)
        if form is not None:
            self.parts += parts
        return parts

    def has_form(self, form: Form) -> bool:
        """Returns whether a choice that ended by itself has the form; any other has it as far as it goes."""
        if self.finish not in ("stop", "tool_calls"):
            return True
        found = Folded.of(self.parts)
        are_kept = all(form.keeps_call(begin.name, arguments) for begin, arguments in found.calls)
        return are_kept and (self.finish == "tool_calls" or form.is_kept(found.text))

    @property
    def mean_logprob(self) -> float:
        return self.total_logprob / max(1, self.text.num_tokens)


def best(choices: Sequence[Choice], number: int | None, *, ranked: bool) -> list[int]:
    """Returns the indices of the best `number` choices, by mean logprob unless they came `ranked`. If `number` is None
    or not below the number of choices, all keep their order.
    """
    indices = list(range(len(choices)))
    if number is None or number >= len(choices):
        return indices
    if not ranked:
        indices.sort(key=lambda index: choices[index].mean_logprob, reverse=True)
    return indices[:number]
