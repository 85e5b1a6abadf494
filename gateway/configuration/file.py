"""headgate.toml: the same settings as the variables, and the served models. Nothing but the file is read.

A setting's name is its variable's name in lower case without `HEADGATE_`. Settings of the file become variables before a
process starts, so the settings classes alone say which values are right. A variable that is set already wins.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from accounting.values.setting_rows import NAMES
from gateway.base.settings import PREFIX, ModelSource, Name, SettingsError
from gateway.base.upstream_source import UpstreamName, UpstreamSource
from gateway.configuration.model_sources import fault, place, table
from gateway.configuration.place import CONFIG, CONFIG_NAMES
from workers.process import masked, setting_forms
from workers.process.refused_settings import Problem

OF_ONE_PROCESS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("HOME", "CONFIG", "CONFIG_NAMES", "SLOT", "MODEL", "MODEL_ID", "MODELS", "MODELS_FILE", "LISTEN_FD"),
        *("LOCAL_FD", "LINK_CERT", "LINK_KEY"),
        *("OPS_FD", "HEARTBEAT_FD", "OPS_BIND", "WORKER_ADDRESS", "JOBS_PROCESS", "JOBS_PULSE"),
    )
)
"""Variables that differ between processes, or that say where the file is. A file does not have them."""
SETTINGS = {name.removeprefix(PREFIX).lower(): name for name in sorted(NAMES - OF_ONE_PROCESS)}
"""Variables by their names in a file."""
OF_WORKERS = ("engine_", "threads", "metrics_tenant_detail")
"""The settings that a model may have for its own workers begin with one of these."""


class Price(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Rates in the price sheet's currency for a million tokens."""

    input: float = pydantic.Field(ge=0, le=1e6)
    """The rate of a prompt's tokens."""
    cached: float | None = pydantic.Field(default=None, ge=0, le=1e6)
    """The rate of cached tokens. If it is unset, it is `input`."""
    output: float = pydantic.Field(ge=0, le=1e6)
    """The rate of an answer's tokens."""
    batch_share: float = pydantic.Field(default=0.5, ge=0, le=1)
    """The share of the rates that a batch pays."""


class ModelEntry(ModelSource, frozen=True):
    """A model of the file: the settings for gateways, and those for its workers."""

    replicas: int = pydantic.Field(default=1, ge=1, le=64)
    """The number of workers; each has a copy of the model."""
    price: Price | None = None
    """The model's first price, used if the default price sheet has none for it."""


WORKER_FIELDS = frozenset(ModelEntry.model_fields) - frozenset(ModelSource.model_fields)


@dataclass(frozen=True, slots=True)
class Entry:
    """A checked model of the file."""

    told: ModelEntry
    env: Mapping[str, str]
    """Variables of its workers."""

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns what a worker's environment has for this model. Names say that they are of the file."""
        length = self.told.max_model_len
        own = {**self.env, **({} if length is None else {"HEADGATE_ENGINE_MAX_MODEL_LEN": str(length)})}
        names = [*filter(None, environ.get(CONFIG_NAMES, "").split(",")), *own]
        return {**own, CONFIG_NAMES: ",".join(names)} if own else {}

    @property
    def source(self) -> dict[str, Any]:
        """The settings for gateways, without the path."""
        return self.told.model_dump(exclude={"path", *WORKER_FIELDS}, exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Entry] = field(default_factory=dict)
    foreign: Collection[str] = ()
    """The names of the models that upstreams answer for."""

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns what the file adds to an environment."""
        added = {
            name: value
            for name, value in self.variables.items()
            if name not in environ and setting_forms.is_given(name, value)
        }
        return {**added, CONFIG: str(self.path), CONFIG_NAMES: ",".join(sorted(added))}


def read(path: Path) -> ConfigFile:
    """Reads a file. Raises `SettingsError` for the first fault, one sentence with the setting and what to do, and with
    the faults of all settings and tables."""
    content, faults = table(path), list[SettingsError]()
    models, upstreams = content.pop("models", {}), dict[str, UpstreamSource]()
    with _noted(faults):
        upstreams = _upstreams(path, content.pop("upstreams", {}))
    variables: dict[str, str] = {}
    for name, value in content.items():
        with _noted(faults):
            variables.update(_variables(path, {name: value}, SETTINGS))
    entries: dict[str, Entry] = {}
    if not isinstance(models, dict) or not all(isinstance(entry, dict) for entry in models.values()):
        faults.append(SettingsError(f"models in {path} must be tables like [models.NAME], each with a path."))
        models = {}
    for name, entry in models.items():
        with _noted(faults):
            entries[name] = _entry(path, name, entry)
    if faults:
        problems = [one for fault in faults for one in fault.problems or [Problem("", str(path), None, str(fault))]]
        raise SettingsError(str(faults[0]), problems)
    if upstreams:
        told = {name: one.model_dump(mode="json", exclude_defaults=True) for name, one in upstreams.items()}
        variables[f"{PREFIX}UPSTREAMS"] = json.dumps(told)
    foreign = {name for one in upstreams.values() for name in one.models}
    return ConfigFile(path, variables, entries, foreign)


@contextmanager
def _noted(faults: list[SettingsError]) -> Iterator[None]:
    """Keeps a fault for later, so that the next setting is read too."""
    try:
        yield
    except SettingsError as fault:
        faults.append(fault)


def _upstreams(path: Path, entries: Any) -> dict[str, UpstreamSource]:
    """Checks the tables like [upstreams.NAME]. Raises `SettingsError`."""
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        said = f"upstreams in {path} must be tables like [upstreams.NAME], each with a url and models."
        raise _refused(path, "upstreams", said)
    try:
        return pydantic.TypeAdapter(dict[UpstreamName, UpstreamSource]).validate_python(entries)
    except pydantic.ValidationError as error:
        raise _refused(path, f"upstreams.{place(error)}", f"upstreams.{_fault(error)} (in {path}).") from None


def _fault(error: pydantic.ValidationError) -> str:
    """Returns the first fault without what was given, which may be a credential."""
    return f"{place(error)}: {error.errors(include_input=False)[0]['msg'].removeprefix('Value error, ')}"


def _variables(
    path: Path, content: Mapping[str, Any], known: Mapping[str, str], where: str = "", also: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if name not in known:
            raise _refused(
                path, where + name, f"{where}{name} in {path} is not a setting. {_hint(name, {*known, *also})}"
            )
        text = _text(value)
        if text is None:
            said = f"{where}{name} in {path} must be a number, a text, true or false, or a list of texts."
            raise _refused(path, where + name, said)
        yield known[name], text


def _refused(path: Path, setting: str, said: str, value: str | None = None) -> SettingsError:
    shown = None if value is None else masked.text(value)[:80]
    return SettingsError(said, [Problem(setting, str(path), shown, said)])


def _hint(name: str, known: Iterable[str]) -> str:
    if (plain := name.lower().removeprefix(PREFIX.lower())) != name and plain in known:
        return f"Write {plain}."
    if PREFIX + name.upper() in OF_ONE_PROCESS:
        if name in ("model", "model_id"):
            return "Models are tables: [models.NAME] with a path."
        return "It differs between processes, so it is a variable or a flag and not in a file."
    meant = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"Did you mean {meant[0]}?" if meant else "`headgate config example` shows all of them."


def _text(value: Any) -> str | None:
    """Returns a value as a variable has it; None for a table or a date."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ",".join(value)
    return None


def _directory(file: Path, path: str) -> str:
    """Returns a path that begins with `.` or `~` whole: the first is relative to the file. A hub id stays as it is."""
    return str((file.parent / Path(path).expanduser()).resolve()) if path.startswith((".", "~")) else path


def _entry(path: Path, name: str, entry: dict[str, Any]) -> Entry:
    try:
        pydantic.TypeAdapter(Name).validate_python(name)
    except pydantic.ValidationError:
        raise SettingsError(f"The model name {name!r} in {path} must have 1 to 256 characters and no space.") from None
    fields = {key: value for key, value in entry.items() if key in ModelEntry.model_fields}
    rest = {key: value for key, value in entry.items() if key not in fields}
    own = {key: variable for key, variable in SETTINGS.items() if key.startswith(OF_WORKERS)}
    env = dict(_variables(path, rest, own, f"models.{name}.", ModelEntry.model_fields))
    try:
        told = ModelEntry.model_validate(fields)
        return Entry(told.model_copy(update={"path": _directory(path, told.path)}), env)
    except pydantic.ValidationError as error:
        first, setting = error.errors()[0], f"models.{name}.{place(error)}"
        if first["type"] == "missing":
            said = f"models.{name} in {path} has no {place(error)}, which every model needs."
            raise _refused(path, setting, said) from None
        raise _refused(path, setting, f"models.{name}.{fault(error)} (in {path}).", str(first["input"])) from None
