"""One sentence for a setting that cannot be used: its name, its value, where it was set, and what was expected.

It takes faults in the form of pydantic's `errors()`, and checks of `workers/process/setting_forms.py`. Every process uses
it, so that all of them say the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from workers.process import masked

CONFIG, CONFIG_NAMES = "HEADGATE_CONFIG", "HEADGATE_CONFIG_NAMES"
"""The variables by which the `headgate` command tells a process of its file: its path, and what was set by it."""
PREFIX = "HEADGATE_"
Settings = TypeVar("Settings", bound=pydantic.BaseModel)
_NO_KEY_FILE = (
    "`headgate migrate` draws it for a new installation; on a further host, copy secrets/ from the first one."
)
_NEEDED = {
    "HEADGATE_MODEL": "Set it to a model's directory or hub id, or name the model with --model.",
    "HEADGATE_URL": "Set it to the base URL of the gateways, like http://127.0.0.1:8080.",
    "HEADGATE_BROKER_URL": "Set it to the broker of the gateways, like redis://127.0.0.1:6379/0.",
}
"""Advice to a start that lacks a setting, by its name."""
_SHOWN = 80
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of one setting, as `headgate config check --json` shows it."""

    setting: str
    """The variable, or the key of the file; empty where the fault is of no single one."""
    source: str
    """The file that has it, or `environment`."""
    value: str | None
    """The value as it was given, with secrets masked. It is None if nothing was."""
    message: str
    """The whole sentence."""


class SettingsError(Exception):
    """A setting cannot be used. The message is one sentence for the operator about the first of `problems`."""

    def __init__(self, sentence: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(sentence)
        self.problems = problems


def key_file(home: Path, name: str) -> bytes:
    """Reads a key file of the state directory. Raises `SettingsError`."""
    path = home / "secrets" / name
    try:
        value = path.read_bytes()
    except OSError as error:
        remedy = f" {_NO_KEY_FILE}" if isinstance(error, FileNotFoundError) else ""
        raise SettingsError(f"Cannot read the key file {path}: {error.strerror}.{remedy}") from None
    if len(value) < 32:
        raise SettingsError(f"The key file {path} is too short: 32 bytes are needed.")
    return value


def read(
    settings: type[Settings],
    values: Mapping[str, str],
    checks: Mapping[str, Callable[[str], str]],
    environ: Mapping[str, str],
) -> Settings | list[Problem]:
    """Returns the settings of a process, or all problems with them. `checks` are for what no field has."""
    found = list(refused(checks, environ))
    try:
        made = settings.model_validate(values)
    except pydantic.ValidationError as error:
        return [*(_of(fault, environ) for fault in error.errors()), *found]
    return found or made


def refused(checks: Mapping[str, Callable[[str], str]], environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yields a problem for each variable that is set and that its check refuses."""
    for name, check in checks.items():
        if name not in environ:
            continue
        try:
            check(environ[name])
        except ValueError as error:
            yield _problem(name, environ, str(error))


def place(name: str, environ: Mapping[str, str]) -> str:
    """Says which setting it is: one of the file, or a variable."""
    if _is_of_file(name, environ):
        return f"the setting {name.removeprefix(PREFIX).lower()} of {environ.get(CONFIG)} ({name})"
    return f"the environment variable {name}"


def _of(fault: Mapping[str, Any], environ: Mapping[str, str]) -> Problem:
    if not fault["loc"]:  # a message about several settings
        message = str(fault["msg"]).removeprefix("Value error, ")
        first = re.search(rf"{PREFIX}[A-Z0-9_]+", message)
        name = first[0] if first else ""
        return Problem(name, _source(name, environ), environ.get(name), f"{message}.")
    name = PREFIX + str(fault["loc"][0]).upper()
    if fault["type"] == "missing" and len(fault["loc"]) == 1:
        return Problem(name, "environment", None, f"The environment variable {name} is not set. {_needed(name)}")
    inside = ".".join(str(part) for part in fault["loc"][1:])
    return _problem(name, environ, f"{inside}: {_expected(fault)}" if inside else _expected(fault))


def _needed(name: str) -> str:
    return _NEEDED.get(name, "docs/configuration.md says what it is.")


def _problem(name: str, environ: Mapping[str, str], expected: str) -> Problem:
    value = environ.get(name)
    shown = None if value is None else masked.setting(name, value)[:_SHOWN]
    given = "" if shown is None else f" = {shown!r}"
    return Problem(name, _source(name, environ), shown, f"Cannot use {place(name, environ)}{given}: {expected}.")


def _source(name: str, environ: Mapping[str, str]) -> str:
    return environ.get(CONFIG, "") if _is_of_file(name, environ) else "environment"


def _is_of_file(name: str, environ: Mapping[str, str]) -> bool:
    return name in environ.get(CONFIG_NAMES, "").split(",")


def _expected(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "string_pattern_mismatch":
        return "docs/configuration.md says how it is written"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}..."
    return message.replace("Input should", "it should", 1).rstrip(".")
