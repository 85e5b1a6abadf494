"""Libraries that follow grammars, compared over hard JSON schemas: what they enforce, how fast they compile, how fast
they give masks, and how much memory they take.

    python benchmarks/grammars.py --vocabulary cl100k_base.tiktoken [--result FILE]

`tests/hard_schemas.py` has the schemas, each with documents that satisfy it and documents that do not. A candidate is a
library with its own way of reading a JSON schema, or a library behind our gateway (`headgate`). It must accept every good
document and refuse every bad one, and every text of random walks through its masks must satisfy the schema, as the
package jsonschema reads it. Each schema runs in a process of its own with a limit of time. Libraries that are not
installed are left out. The vocabulary is a file with one token a line, in base64, and its number; without one it is the
demo model's.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from hard_schemas import CASES, Case

from gateway.base.errors import ApiError
from gateway.structured.form import StructuredOutputs, form_of
from workers.engine.grammars import vocabulary
from workers.engine.grammars.library import GrammarError, Library

DEMO, DEMO_SIZE = Path(__file__).resolve().parent.parent / "ops" / "demo_model" / "model", 4096
LIMIT_S = 10.0
NUM_WALKS, MAX_TOKENS = 6, 120
CLOSING = (b'"', b"]", b"}", b'"}', b'"]', b'",', b",")


class Refused(Exception):
    """The candidate does not take the schema."""


class Matcher(Protocol):
    def accept(self, token: int) -> bool: ...

    def mask(self) -> bytes: ...

    def may_end(self) -> bool: ...


Start = Callable[[], Matcher]
Compile = Callable[[Any], Start]
"""Compiles a schema and returns what starts a text. Raises `Refused`."""


# --- candidates ---


def headgate(texts: Sequence[bytes]) -> Compile:
    library = Library(texts)

    def compile_schema(schema: Any) -> Start:
        try:
            form = form_of(None, StructuredOutputs(json=schema))
            assert form is not None
            return library.compile(form.grammar).start
        except (ApiError, GrammarError) as error:
            raise Refused(str(error)) from None

    return compile_schema


def llguidance(texts: Sequence[bytes]) -> Compile:
    library = Library(texts)

    def compile_schema(schema: Any) -> Start:
        told = {"x-guidance": {"whitespace_flexible": False}} | (schema if isinstance(schema, dict) else {})
        try:
            return library.compile(f"start: %json {json.dumps(told)}").start
        except GrammarError as error:
            raise Refused(str(error)) from None

    return compile_schema


class XGrammarMatcher:
    def __init__(self, library: Any, compiled: Any, size: int) -> None:
        self._library, self._matcher = library, library.GrammarMatcher(compiled)
        self._words = library.allocate_token_bitmask(1, size)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def mask(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._words)
        data: bytes = self._words.numpy().tobytes()
        return data

    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())


def xgrammar(texts: Sequence[bytes]) -> Compile:
    import xgrammar as library

    kind, size = library.VocabType.RAW, len(texts)
    info = library.TokenizerInfo(list(texts), kind, vocab_size=size, stop_token_ids=[])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Start:
        try:
            compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"))
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)) from None
        return lambda: XGrammarMatcher(library, compiled, size)

    return compile_schema


class OutlinesMatcher:
    def __init__(self, guide: Any, size: int) -> None:
        self._guide, self._size = guide, size

    def accept(self, token: int) -> bool:
        if token not in self._guide.get_tokens():
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def mask(self) -> bytes:
        words = np.zeros(-(-self._size // 32), dtype=np.int32)
        self._guide.write_mask_into(words.ctypes.data, words.size, words.itemsize)
        return words.tobytes()

    def may_end(self) -> bool:
        return self._size - 1 in self._guide.get_tokens()


def outlines(texts: Sequence[bytes]) -> Compile:
    from outlines_core import Guide, Index, Vocabulary, json_schema

    ids: dict[bytes, list[int]] = {}
    for number, text in enumerate(texts):
        if text:
            ids.setdefault(text, []).append(number)
    words = Vocabulary(len(texts), ids)

    def compile_schema(schema: Any) -> Start:
        try:
            index = Index(json_schema.build_regex_from_schema(json.dumps(schema), ""), words)
        except (RuntimeError, ValueError, OSError, TypeError) as error:
            raise Refused(str(error)) from None
        return lambda: OutlinesMatcher(Guide(index), len(texts) + 1)

    return compile_schema


CANDIDATES: dict[str, tuple[str, Callable[[Sequence[bytes]], Compile]]] = {
    "headgate": ("llguidance", headgate),
    "xgrammar": ("xgrammar", xgrammar),
    "llguidance": ("llguidance", llguidance),
    "outlines-core": ("outlines_core", outlines),
}


# --- one schema ---


class Tokens:
    """The vocabulary, and its greedy split of a text."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._ids = {text: number for number, text in enumerate(texts) if text}
        self._longest = max(map(len, self._ids))
        self.closing = np.array([self._ids[text] for text in CLOSING if text in self._ids])

    def split(self, text: str) -> list[int]:
        data, found = text.encode(), []
        while data:
            size = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


def allowed(mask: bytes, size: int) -> Any:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:size])


def follows(start: Start, tokens: Tokens, text: str, times: list[float]) -> bool:
    matcher = start()
    for token in tokens.split(text):
        begun = time.perf_counter()
        mask = matcher.mask()
        times.append(time.perf_counter() - begun)
        if not mask[token // 8] >> token % 8 & 1 or not matcher.accept(token):
            return False
    return matcher.may_end()


def walk(start: Start, tokens: Tokens, seed: int, times: list[float]) -> str | None:
    """Returns a random text, or None if it does not end in time."""
    rng, matcher, text = random.Random(seed), start(), b""
    for _ in range(MAX_TOKENS):
        begun = time.perf_counter()
        mask = matcher.mask()
        times.append(time.perf_counter() - begun)
        found = allowed(mask, len(tokens.texts))
        if matcher.may_end() and (not len(found) or rng.random() < 0.5):
            return text.decode()
        if not len(found):
            return None
        closing = np.intersect1d(found, tokens.closing)
        chosen = closing if len(closing) and rng.random() < 0.5 else found
        token = int(chosen[rng.randrange(len(chosen))])
        if not matcher.accept(token):
            raise AssertionError("a token of the mask is refused")
        text += tokens.texts[token]
    return None


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def judged(case: Case, compile_schema: Compile, tokens: Tokens) -> dict[str, Any]:
    before, begun = private_bytes(), time.perf_counter()
    try:
        start = compile_schema(case.schema)
        start().mask()
    except Refused as error:
        return {"outcome": "refused", "why": str(error).partition("\n")[0][:200]}
    compile_s = time.perf_counter() - begun
    times: list[float] = []
    narrow = [text[:80] for text in case.good if not follows(start, tokens, text, times)]
    let_through = [text[:80] for text in case.bad if follows(start, tokens, text, [])]
    texts = [walk(start, tokens, seed, times) for seed in range(NUM_WALKS)]
    schema = json.loads(json.dumps(case.schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    invalid = [text[:200] for text in texts if text is not None and not is_valid(validator, text)]
    return {
        "outcome": "wrong" if let_through or invalid else "narrow" if narrow else "exact",
        "compile_ms": compile_s * 1000,
        "mask_ms": [one * 1000 for one in times],
        "bytes": max(0, private_bytes() - before),
        "let_through": let_through,
        "narrow": narrow,
        "invalid": invalid[:3],
        "num_ended": sum(text is not None for text in texts),
    }


def is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text, parse_float=_decimal)))
    except ValueError:
        return False


def _decimal(text: str) -> Decimal | float:
    """Returns a decimal, or infinity beyond what decimals hold."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def alone(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs it in a process of its own with a limit of processor time."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001 - the process ends, and a library may panic with any class
            result = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:200]}
        with os.fdopen(writer, "wb") as stream:
            stream.write(json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else {"outcome": "failed", "why": f"more than {LIMIT_S:.0f} s"}


# --- all of them ---


def read_vocabulary(path: Path | None) -> list[bytes]:
    if path is None:
        return vocabulary.read(DEMO, DEMO_SIZE)
    pairs = [line.split() for line in path.read_text().splitlines()]
    texts = [b""] * (1 + max(int(number) for _, number in pairs))
    for text, number in pairs:
        texts[int(number)] = base64.b64decode(text)
    return texts


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(results: dict[str, dict[str, Any]], load_s: float) -> dict[str, Any]:
    ran = [result for result in results.values() if "compile_ms" in result]
    masks = [one for result in ran for one in result["mask_ms"]]
    outcomes = [result["outcome"] for result in results.values()]
    return {
        "load_s": round(load_s, 2),
        **{name: outcomes.count(name) for name in ("exact", "narrow", "wrong", "refused", "failed")},
        "compile_ms_median": round(statistics.median(result["compile_ms"] for result in ran), 2),
        "compile_ms_max": round(max(result["compile_ms"] for result in ran), 1),
        "mask_ms_median": round(statistics.median(masks), 3),
        "mask_ms_p99": round(percentile(masks, 0.99), 2),
        "mask_ms_max": round(max(masks), 1),
        "mib_median": round(statistics.median(result["bytes"] for result in ran) / 2**20, 1),
        "mib_max": round(max(result["bytes"] for result in ran) / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--candidates", nargs="*", default=list(CANDIDATES))
    parser.add_argument("--result", type=Path)
    told = parser.parse_args()
    texts = read_vocabulary(told.vocabulary)
    tokens = Tokens(texts)
    found: dict[str, Any] = {}
    for name in told.candidates:
        library, load = CANDIDATES[name]
        if importlib.util.find_spec(library) is None:
            continue
        begun = time.perf_counter()
        compile_schema = load(texts)
        load_s = time.perf_counter() - begun
        results = {case.name: alone(partial(judged, case, compile_schema, tokens)) for case in CASES}
        found[name] = {
            "version": importlib.metadata.version(library),
            "summary": summary(results, load_s),
            "schemas": {
                key: {field: value for field, value in result.items() if field != "mask_ms" and value != []}
                for key, result in results.items()
            },
        }
        print(name, json.dumps(found[name]["summary"]), flush=True)
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "vocabulary": f"{told.vocabulary.name if told.vocabulary else 'the demo model'}, {len(texts)} tokens",
        "num_schemas": len(CASES),
        "candidates": found,
    }
    if told.result is not None:
        told.result.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
