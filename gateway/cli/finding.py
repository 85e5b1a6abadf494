"""The objects of `headgate doctor`: an installation, and what a check finds of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.base.home import Home

State = Literal["ok", "warning", "failing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `fix` says what to do, unless all is well."""

    name: str
    state: State
    says: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Installation:
    """The object of all checks: a home, and the environment with what headgate.toml adds to it."""

    home: Home
    environ: Mapping[str, str]

    @property
    def runs(self) -> bool:
        return self.home.runs_as() is not None


Check = Callable[[Installation], Iterator[Finding]]


def failing(name: str, sentence: str) -> Finding:
    """Returns the finding of a sentence that says what to do after its last colon."""
    said, _, remedy = sentence.rpartition(": ")
    return Finding(name, "failing", said, remedy[:1].upper() + remedy[1:])
