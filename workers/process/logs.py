"""Logs of every process: one JSON object per line on stderr, or plain text where that is a terminal. Hostile values are
harmless in both.

The process has only one of these formatters, and they do the redaction, so every handler is redacted. No process logs a prompt,
an output, token ids, a body or a secret.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol, TextIO

import msgspec

MAX_VALUE_CHARS = 1024
MAX_EQUAL_PER_S = 10
MAX_ERRORS = 3
MAX_FRAMES = 8
ACCESS = "gateway.access"
"""The logger of lines that are equal to each other and all count."""
PLACES = "at"
"""The name of a list of places in the code, of an error or given as `extra`."""
FORM = "HEADGATE_LOG_FORM"
QUIET = ("aiohttp", "aiosqlite", "celery", "kombu")
"""Libraries of which only warnings are logged. aiosqlite would tell the parameters of statements."""

_KEY = re.compile(r"hg_(?:live|test|admin|batch|run)_[A-Za-z0-9_]+|(?i:bearer) +[!-~]+|(?i:cookie): *[!-~ ]+")
_PLAIN = re.compile(rf"[!-9;-~]{{0,{MAX_VALUE_CHARS}}}")
"""A text without blanks and colons. Such a text holds nothing that `_KEY` looks for, unless it holds `hg_`."""
_encode_ascii = json.JSONEncoder(ensure_ascii=True, default=str).encode
_encode = msgspec.json.Encoder(enc_hook=str).encode
_HARMLESS = frozenset({int, float, bool, type(None)})
"""The types whose every value may appear in a line."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "event"}


class Handled(Protocol):
    """A request, as lines name it that are written while it is handled."""

    @property
    def log_ids(self) -> Mapping[str, str]: ...


HANDLED: ContextVar[Handled | None] = ContextVar("handled", default=None)
"""The request that this task handles. A task begins with its creator's request, so one that works for many requests, and
may have been begun by any of them, is begun in a context of its own.
"""
_DETAIL = re.compile(r"\nDETAIL:.*?(?=\n\[|\Z)", re.DOTALL)
"""PostgreSQL's description of a refused row. It quotes the values, which may be tenants' words."""


def text_of(error: BaseException) -> str:
    """Returns what an error says, without the values of a row that PostgreSQL refused."""
    return _DETAIL.sub("", str(error))


def clean(value: object) -> object:
    """Returns a value that may appear in a line: redacted, cut, without control or line-separating characters."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str) and _PLAIN.fullmatch(value) and "hg_" not in value:
        return value
    text = _KEY.sub("[redacted]", str(value)[: 4 * MAX_VALUE_CHARS])[:MAX_VALUE_CHARS]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)[:MAX_VALUE_CHARS]


class JsonFormatter(logging.Formatter):
    """A formatter. `event` is the name given as `extra`, with the message as `msg`, or else the message itself. The
    rest are key-values given as `extra`, those that every line of the process has, and the ids of the request that is
    handled. A line that names another request has none of these ids.
    """

    def __init__(self, **everywhere: object) -> None:
        super().__init__()
        self._everywhere = everywhere
        self._second = (0, "")
        """The last second that a line was written in, as it is written."""

    def format(self, record: logging.LogRecord) -> str:
        message, event = clean(record.getMessage()), getattr(record, "event", None)
        line = {
            "ts": f"{self._written(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "event": clean(event) if event else message,
            "logger": record.name,
            **({"msg": message} if event else {}),
            **self._everywhere,
        }
        for name, value in vars(record).items():
            if name == PLACES:
                line[name] = [clean(place) for place in value]
            elif name not in _STANDARD:
                line[name] = value if type(value) in _HARMLESS else clean(value)
        handled = HANDLED.get()
        if handled is not None:
            ids = handled.log_ids
            if line.get("request_id", ids["request_id"]) == ids["request_id"]:
                line = {**ids, **line}
        if record.exc_info and record.exc_info[1] is not None:
            errors = _chain(record.exc_info[1])
            line["error"] = clean(" from ".join(f"{type(error).__name__}: {text_of(error)}" for error in errors))
            line[PLACES] = [clean(place) for error in errors for place in _places(error)]
        return _encoded(line)

    def _written(self, second: int) -> str:
        known, text = self._second
        if known != second:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = (second, text)
        return text


def _encoded(line: Mapping[str, object]) -> str:
    """Returns the line in ASCII. The quick encoder escapes no other characters, and takes no halves of surrogates."""
    try:
        encoded = _encode(line)
    except UnicodeEncodeError:
        return _encode_ascii(line)
    return encoded.decode() if encoded.isascii() else _encode_ascii(line)


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error and what it was raised from."""
    errors = [error]
    while len(errors) < MAX_ERRORS:
        last = errors[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None:
            break
        errors.append(before)
    return errors


def _places(error: BaseException) -> list[str]:
    """Returns places only: source lines and locals may hold a prompt."""
    frames = list(traceback.extract_tb(error.__traceback__))[-MAX_FRAMES:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


class Repeats(logging.Filter):
    """A filter of repeats: more than 10 equal events a second are counted, and the next one let through reports their
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ACCESS:
            return True
        key = (record.name, str(record.msg)[:80])
        second, count = self._seen.get(key, (0, 0))
        now = int(record.created)
        if now == second:
            self._seen[key] = (second, count + 1)
            return count < MAX_EQUAL_PER_S
        if count > MAX_EQUAL_PER_S:
            record.num_suppressed = count - MAX_EQUAL_PER_S
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = (now, 1)
        return True


class Lines(logging.StreamHandler[TextIO]):
    """Writes lines to a stream; those of one call of `handle_together` by one write. Each write gives up the
    interpreter's lock, and a busy process waits to get it back.
    """

    _gathered: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._gathered is None:
            super().emit(record)
            return
        try:
            self._gathered.append(self.format(record) + self.terminator)
        except Exception:  # noqa: BLE001 - as the library's own handlers do
            self.handleError(record)

    @contextmanager
    def together(self) -> Iterator[None]:
        with self.lock or nullcontext():
            self._gathered = []
            try:
                yield
            finally:
                lines, self._gathered = "".join(self._gathered), None
                if lines:
                    self.stream.write(lines)
                    self.flush()


def handle_together(logger: logging.Logger, records: Iterable[logging.LogRecord]) -> None:
    """Hands records to a logger, whose lines are written at once."""
    with ExitStack() as stack:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, Lines):
                stack.enter_context(handler.together())
        for record in records:
            logger.handle(record)


class TextFormatter(JsonFormatter):
    """The same lines for a person at a terminal: time, level, event, message, key=value. Redacted and harmless alike."""

    def format(self, record: logging.LogRecord) -> str:
        line = json.loads(super().format(record))
        ts, level, event = (line.pop(name) for name in ("ts", "level", "event"))
        message, places = line.pop("msg", ""), line.pop(PLACES, [])
        line.pop("logger")
        facts = " ".join(f"{name}={value}" for name, value in line.items() if value is not None)
        first = " ".join(part for part in (ts[11:23], f"{level:<7}", event, message and f"- {message}", facts) if part)
        return "\n".join([first, *(f"    {place}" for place in places)])


def wants_text() -> bool:
    """Says whether lines are for a person: the operator has said so, or standard error is a terminal."""
    return os.environ.get(FORM, "text" if sys.stderr.isatty() else "json") == "text"


def configure(level: str, **everywhere: object) -> None:
    """Takes over the process's root logger, and Python's warnings. The start of the process calls it once."""
    handler = Lines(sys.stderr)
    handler.setFormatter((TextFormatter if wants_text() else JsonFormatter)(**everywhere))
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    # No line tells them, and each would be looked up for each line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
