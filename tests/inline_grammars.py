"""Grammars for the engine without a child process: compiled when they are taken, some rounds after they were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.grammars.grammar import Key, Outcome
from workers.engine.grammars.grammar_queue import GrammarsWait
from workers.engine.grammars.library import Compiled, GrammarError, Library


class InlineGrammars:
    def __init__(self, vocabulary: Sequence[bytes], num_rounds: int = 2) -> None:
        self.library = Library(vocabulary)
        self.num_rounds = num_rounds
        self.num_compiled = 0
        self.kept: dict[Key, Outcome] = {}
        self._asked: dict[Key, list] = {}

    def ask(self, key: Key, text: str) -> Compiled | None:
        outcome = self.kept.get(key)
        if isinstance(outcome, GrammarError):
            raise GrammarError(str(outcome))
        if outcome is None:
            self._asked.setdefault(key, [text, self.num_rounds])
        return outcome

    def drop(self, key: Key) -> bool:
        return self._asked.pop(key, None) is not None

    def take(self) -> list[tuple[Key, Outcome]]:
        for asked in self._asked.values():
            asked[1] -= 1
        ready = [key for key, (_, rounds) in self._asked.items() if rounds < 0]
        found = [(key, self._compile(self._asked.pop(key)[0])) for key in ready]
        self.kept.update((key, outcome) for key, outcome in found if not isinstance(outcome, GrammarsWait))
        return found

    def _compile(self, text: str) -> Outcome:
        self.num_compiled += 1
        try:
            return self.library.compile(text)
        except GrammarError as error:
            return error
