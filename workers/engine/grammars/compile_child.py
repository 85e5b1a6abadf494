"""`python -m workers.engine.grammars.compile_child` tries grammars in a separate process, so that a hostile one kills
this process alone.

It reads frames from standard input and answers on standard output: first the vocabulary, then one grammar after the
other. A try is a compilation and a walk of some tokens through the automaton. If it takes more time
or memory than allowed, the kernel ends the process. The answer is then the end of the stream.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from workers.engine.grammars.grammar import Automaton, begin
from workers.engine.grammars.library import GrammarError, Library
from workers.process.children.parent import die_with
from workers.protocol.frames import Frames

LIMIT_S = 2.0
"""Processor seconds of one compilation."""
LIMIT_BYTES = 512 << 20
"""Bytes of memory beyond those that the process uses when it is ready."""
MAX_COMPILED_BYTES = 64 << 20
NUM_STEPS = 48
"""Number of tokens of the walk."""
STACK_BYTES = 4 << 20
"""Stack of the thread that tries grammars. The library recurses for each nested rule. The worker compiles with a larger
stack, so a grammar that is too deep ends this process alone, whatever the limits that both were started with."""


class Start(msgspec.Struct, frozen=True):
    vocabulary: list[bytes]
    limit_s: float
    limit_bytes: int


class Verdict(msgspec.Struct, frozen=True):
    """The result of a try. If `fault` is empty, the grammar may be used."""

    fault: str


QUESTIONS: Frames[Start | str] = Frames(Start | str)
VERDICTS: Frames[Verdict] = Frames(Verdict)


def main() -> int:
    die_with(int(sys.argv[1]))
    given, answers = sys.stdin.buffer.read, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not become an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends this process when it ends
    os.nice(5)
    start = QUESTIONS.read(given)
    if not isinstance(start, Start):
        return 0
    library = Library(start.vocabulary)
    _limit_memory(start.limit_bytes)
    answers.write(VERDICTS.encode(Verdict("")))
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        while isinstance(text := QUESTIONS.read(given), str):
            fault = _timed(start.limit_s, thread.submit(try_out, library, text).result)
            try:
                answers.write(VERDICTS.encode(Verdict(fault)))
            except BrokenPipeError:  # the worker was killed meanwhile, and nobody waits
                break
    return 0


def try_out(library: Library, text: str) -> str:
    """Returns what is wrong with the grammar, or an empty text if nothing is."""
    try:
        compiled = library.compile(text)
        if compiled.num_bytes > MAX_COMPILED_BYTES:
            return "the grammar is too large"
        _walk(begin(compiled, ()))
    except GrammarError as error:
        return str(error) or "the grammar cannot be compiled"
    except MemoryError:
        return "the grammar takes too much memory"
    return ""


def _walk(automaton: Automaton) -> None:
    """Follows the automaton for some tokens. An automaton that is slow to follow shows it here."""
    rng = random.Random(0)
    for _ in range(NUM_STEPS):
        if automaton.ended:
            return
        if automaton.fault:
            raise GrammarError(automaton.fault)
        automaton.advance(_some_bit(automaton.mask, rng))


def _some_bit(mask: bytes, rng: random.Random) -> int:
    """Returns the index of a set bit: the first one at or after a random index."""
    bits = int.from_bytes(mask, "little")
    behind = bits >> (place := rng.randrange(len(mask) * 8))
    chosen, base = (behind, place) if behind else (bits, 0)
    return base + (chosen & -chosen).bit_length() - 1


def _timed(limit_s: float, run: Callable[[], str]) -> str:
    """Runs a function under a timer. The timer's signal is not handled, so it ends the process, whatever it is
    doing."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return run()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(num_bytes: int) -> None:
    """Limits the memory for data. Address space is not limited, because libraries map much more than they use."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, used + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
