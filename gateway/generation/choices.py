"""The state of each choice of one engine request, and the selection of those that the client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.parsers.parts import Folded, OutputParser, Part
from gateway.structured.form import Form
from gateway.text.choice import ChoiceText


@dataclass
class Choice:
    text: ChoiceText
    parser: OutputParser
    num_received: int = 0
    total_logprob: float = 0.0
    """The sum of the logprobs of the tokens up to the choice's end, if they came with logprobs."""
    finish: str | None = None
    parts: list[Part] = field(default_factory=list)
    """The parts so far. They are kept only where the output must have a form."""

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
