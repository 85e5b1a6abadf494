"""Constrained decoding: the state of a choice in its grammar, and the tokens that may come next. The module knows no
torch and no process.

It knows token ids and masks. Bit `t % 8` of byte `t // 8` allows token t, so that four bytes are one word of the op
`logits`. It does not know logits, sequences or how a grammar is compiled: `library` does that.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from workers.engine.grammars.library import Compiled, GrammarError
from workers.engine.grammars.mask_time import MaskTime

logger = logging.getLogger(__name__)

LOST = "the grammar cannot be followed any further"
SLOW_S = 0.25
"""Processor seconds for one mask. A grammar that needs more would delay everybody else's step. `mask_time` bounds what
the masks of a tenant take together."""


Key = tuple[str, bytes]
"""Tenant of the grammar, and the digest of its text. The tenant is in the key so that nobody can find out by timing
what another tenant compiled."""
Outcome = Compiled | GrammarError


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Automaton:
    """One choice's state in its grammar. It follows the output token by token; `fault` says why it cannot continue."""

    def __init__(
        self, compiled: Compiled, end_ids: Iterable[int], output: Sequence[int] = (), mask_time: MaskTime | None = None
    ) -> None:
        """Starts in the grammar after `output`, which was drawn before, here or on another worker. `mask_time` is the
        tenant's; without it the automaton has one of its own."""
        self._mask_time = mask_time or MaskTime()
        self._end_bits = sum(1 << token for token in set(end_ids))
        self._text_bits = (1 << compiled.vocab_size) - 1 & ~self._end_bits
        self.fault = ""
        self.ended = False
        """Whether the text is complete and nothing but an end token can follow."""
        self.mask = b""
        """Mask of the tokens that may be drawn next. End tokens are among them where the text may end."""
        try:
            self._matcher = compiled.start()
            for token in output:
                self._accept(token)
            self._look(self._mask_time.took)
        except BaseException:  # a library in Rust panics with exceptions that are no `Exception`
            logger.exception("a grammar is lost", extra={"event": "grammar_lost"})
            self.fault = self.fault or LOST

    def advance(self, token: int) -> None:
        """Follows a token that was drawn and does not end the choice."""
        try:
            self._accept(token)
            self._look(self._mask_time.took)
        except BaseException:  # a library in Rust panics with exceptions that are no `Exception`
            logger.exception("a grammar is lost", extra={"event": "grammar_lost"})
            self.fault = self.fault or LOST

    def tree_masks(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bytes | None]:
        """Returns the masks at the next token and after each draft of a tree (token_tree.py). A mask is None where the
        grammar or an end token forbids the draft, or follows one that is forbidden, and where the tenant's guesses took
        too long. The automaton's state does not change: accepted drafts are passed to `advance` later. Only a panic of
        the library sets `fault`."""
        here = (self._matcher, self.mask, self.ended, self.fault)
        found: list[bytes | None] = [self.mask]
        matchers = [self._matcher]
        try:
            for token, parent in zip(tokens, parents, strict=True):
                matcher, mask = matchers[parent + 1], None
                may_follow = found[parent + 1] is not None and not self._end_bits >> token & 1
                if may_follow and self._mask_time.may_guess():
                    matcher = self._matcher = matcher.fork()
                    if matcher.accept(token):
                        self._look(self._mask_time.took_guess)
                        mask = None if self.ended or self.fault else self.mask
                        self.ended, self.fault = False, ""
                matchers.append(matcher)
                found.append(mask)
        except BaseException:  # a library in Rust panics with exceptions that are no `Exception`
            logger.exception("a grammar is lost", extra={"event": "grammar_lost"})
            here = (*here[:3], here[3] or LOST)
            found += [None] * (1 + len(tokens) - len(found))
        finally:
            self._matcher, self.mask, self.ended, self.fault = here
        return found

    def _accept(self, token: int) -> None:
        if not self._matcher.accept(token):
            self.fault = self.fault or f"the token {token} is outside of the grammar"

    def _look(self, took: Callable[[float], bool]) -> None:
        if self.fault:
            return
        begun = time.thread_time()
        mask = self._matcher.mask()
        may_end = self._matcher.may_end()
        allowed = int.from_bytes(mask, "little") & self._text_bits
        self.ended = may_end and not allowed
        if may_end:
            allowed |= self._end_bits
        if not allowed and not self.ended:
            self.fault = "no token of the vocabulary fits the grammar here"
        elif not took(took_s := time.thread_time() - begun) or took_s > SLOW_S:
            self.fault = "the grammar is too ambiguous to be followed in time"
        self.mask = allowed.to_bytes(len(mask), "little")


def begin(
    compiled: Compiled, end_ids: Iterable[int], output: Sequence[int] = (), mask_time: MaskTime | None = None
) -> Automaton:
    """Starts a choice in a grammar. Raises `GrammarError` for a grammar that allows nothing here."""
    automaton = Automaton(compiled, end_ids, output, mask_time)
    if automaton.fault or automaton.ended:
        raise GrammarError(automaton.fault or "the grammar allows no text")
    return automaton
