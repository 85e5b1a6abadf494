"""Writes two files about settings: the page docs/configuration.md; and accounting/values/setting_rows.tsv, with whose names
every process compares its environment and whose rows `headgate config` shows. Both follow from the settings classes and the
docstrings below their fields.

`make configuration` writes them; a test fails when they are not current.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
from pydantic_core import PydanticUndefined

from gateway.base.settings import GatewaySettings, ModelSource
from gateway.configuration.file import ModelEntry, Price
from workers.engine.settings import WorkerSettings
from workers.jobs.base.settings import JobsSettings

ROOT = Path(__file__).resolve().parents[1]
PAGE, ROWS = (ROOT / "docs" / "configuration.md", ROOT / "accounting" / "values" / "setting_rows.tsv")
PREFIX = "HEADGATE_"
UNITS = {"s": "seconds", "ms": "milliseconds", "days": "days", "bytes": "bytes"}
UNSET = "unset"

COMMANDS = (
    (
        "HEADGATE_HOME",
        "`.headgate` of the working directory if it is there, else `~/.headgate`",
        "The state directory. `--home` wins over it.",
    ),
    (
        "HEADGATE_CONFIG",
        "headgate.toml in the home, else in the working directory",
        "The settings file. `--config` wins over it.",
    ),
    (
        "HEADGATE_CONFIG_NAMES",
        "none",
        "The variables that the settings file has set. The command sets it for the processes that it starts.",
    ),
    ("HEADGATE_HOST", "`127.0.0.1`", "The address that `headgate up` listens on. `--host` wins over it."),
    ("HEADGATE_PORT", "`8080`", "The port of the base URL of `headgate up`. `--port` wins over it."),
    ("HEADGATE_GATEWAYS", "`1`", "The number of gateway processes of `headgate up`. `--gateways` wins over it."),
    (
        "HEADGATE_URL",
        "what runs in the home",
        "The base URL of the gateways. Commands that ask a running Headgate call it, and so does the jobs process.",
    ),
    (
        "HEADGATE_URL_CA",
        "the system's authorities",
        "A file with the authorities by which the certificate of HEADGATE_URL is known (PEM). It is for commands and the jobs process.",
    ),
    (
        "HEADGATE_API_KEY",
        "the home's",
        "The key that these commands use. Those of operators ignore a key of a tenant, and take the home's admin key"
        " (`hg_admin_...`); `chat` and `batches` ignore an admin key, and take the key of the first start.",
    ),
    (
        "HEADGATE_MODEL",
        "the demo model",
        "The model that `headgate up` serves, a directory or hub id. `--model`, which may be given several times, wins over"
        " it.",
    ),
    (
        "HEADGATE_THREADS",
        "all cores, shared among the workers",
        "The number of threads of each worker. `--threads` of `headgate up` wins over it.",
    ),
    (
        "HEADGATE_ENGINE_TENSOR_PARALLEL",
        "`1`",
        "The number of processes over which each copy of the model is split. `--tensor-parallel` wins over it.",
    ),
    (
        "HEADGATE_DATABASE_URL",
        "SQLite in the home",
        "The database of `up`, `migrate`, `backup`, `restore` and `doctor`, and of the commands that open the books"
        " themselves: `export`, `rerate`, `verify-books`, `journals`, `secrets`, `keys create --admin`.",
    ),
    (
        "HEADGATE_REDIS_URL",
        "an embedded server",
        "The Redis or Valkey that `up` uses. If it is set, `up` starts no server of its own.",
    ),
    (
        "HEADGATE_BROKER_URL",
        "database 1 beside the embedded one",
        "Celery's broker, which `up` hands to all processes.",
    ),
    ("HEADGATE_LOG_FORM", "`text` on a terminal, else `json`", "The form of log lines: `text` or `json`."),
    (
        "HEADGATE_TRACEBACK",
        "none",
        "If it is set, a command that fails by a fault of Headgate shows where it comes from.",
    ),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "none", "The receiver of traces (OTLP over HTTP). If it is unset, none are sent."),
)
PROCESSES: tuple[tuple[str, type[pydantic.BaseModel]], ...] = (
    ("Gateway", GatewaySettings),
    ("Worker", WorkerSettings),
    ("Jobs", JobsSettings),
)
MUST_KNOW: dict[str, frozenset[str]] = {
    "Gateway": frozenset(
        [
            "home",
            "slot",
            "bind",
            "tls_cert",
            "tls_key",
            "ops_bind",
            "state_dir",
            "database_url",
            "redis_url",
            "broker_url",
            "models",
            "models_file",
            "invoice_automatic",
            "drain_s",
            "trace_ratio",
            "request_log_days",
            "log_level",
            "trusted_networks",
            "max_connections",
            "cors_origins",
            "smtp_url",
            "mail_from",
            "webhook_allowed_networks",
            "retention_days",
        ]
    ),
    "Worker": frozenset(
        [
            "home",
            "slot",
            "state_dir",
            "model",
            "model_id",
            "worker_address",
            "redis_url",
            "threads",
            "ops_bind",
            "drain_s",
            "log_level",
            "engine_task",
            "engine_device",
            "engine_dtype",
            "engine_tensor_parallel",
            "engine_kv_dtype",
            "engine_quant",
            "engine_adapters",
            "engine_memory_share",
            "engine_max_model_len",
            "engine_max_running",
            "engine_ttft_target_ms",
            "engine_speculate",
            "engine_draft_model",
            "engine_host_cache",
        ]
    ),
    "Jobs": frozenset(
        ["home", "url", "broker_url", "database_url", "jobs_concurrency", "ops_bind", "webhook_allowed_networks"]
    ),
}
"""The settings that an operator of each process must know, at most 25. All others are for experts: their defaults are right
unless a measurement says otherwise.
"""
HEAD = """# Configuration

This page is written by `make configuration` from the settings classes: change those. Each process reads its environment once,
at its start. `headgate up` passes its own environment on to all processes that it starts, and sets what differs between them: slots,
sockets and models. A `HEADGATE_` variable that no process knows stops every command with one sentence and status 78, and so does a value that
cannot be used of a setting in the [table of commands](#commands). A value of another setting stops the processes that read it, `headgate up`
among them; commands that do not read it run, and `headgate config check` names it.

## headgate.toml
The same settings can stand in a file: in `headgate.toml` of the home, else of the working directory, or where `--config` or
`HEADGATE_CONFIG` says. A name there is the variable's name in lower case without `HEADGATE_`: `drain_s = 30`. A variable wins over the
file, and a flag over both. What is refused stops the same commands as a variable, and a name that is unknown or a file that is no TOML stops all of them.
A URL, an address to listen on, a key or a model that is empty counts as not set, in the file as in the environment. A list that is
empty has no entries. Any other setting may not be empty.
`headgate config check` looks at all of them (with `--json` it lists every fault as `setting`, `source`, `value` and `message`), `headgate config show` shows each value and where it comes from, and `headgate config
example` prints a file to begin with. Variables that differ between processes (home, slots, sockets, addresses) do not stand in a file.

Of each process the first table has what an operator must know. The settings "for experts" have defaults that are right unless a
measurement says otherwise.

Each served model is a table `[models.NAME]` with these settings, and with any setting of workers that begins with `engine_`, for its own
workers. There it wins over a variable, and over a flag of `headgate up`, which is for all models; a flag of `headgate worker` wins over it.
See [models](models.md).
"""


def page() -> str:
    parts = [HEAD, *_fields(MODEL_FIELDS), *_fields(PRICE_FIELDS), *_table("Commands", COMMANDS)]
    for name, settings in PROCESSES:
        told = comments(settings)
        rows = [
            (PREFIX + field.upper(), _default(info), _described(field, info, told))
            for field, info in settings.model_fields.items()
            if not field.startswith("test_")
        ]
        known = {PREFIX + field.upper() for field in MUST_KNOW[name]}
        parts += _table(name, [row for row in rows if row[0] in known])
        parts += _table(f"{name}, for experts", [row for row in rows if row[0] not in known])
    return "\n".join(parts)


MODEL_FIELDS: tuple[type[pydantic.BaseModel], ...] = (ModelSource, ModelEntry)
PRICE_FIELDS: tuple[type[pydantic.BaseModel], ...] = (Price,)


def _fields(kinds: tuple[type[pydantic.BaseModel], ...]) -> Iterator[str]:
    """Returns the table of a model's settings, or of its price."""
    title = "setting of a model" if kinds == MODEL_FIELDS else "rate of its `price`"
    yield f"| {title} | default | what it does |\n|---|---|---|"
    for name, default, text in model_rows(kinds):
        yield f"| `{name}` | {default} | {text} |"
    yield ""


def model_rows(kinds: tuple[type[pydantic.BaseModel], ...]) -> Iterator[tuple[str, str, str]]:
    for kind in kinds:
        told = comments(kind)
        yield from (
            (name, _default(kind.model_fields[name]), _described(name, kind.model_fields[name], told)) for name in told
        )


def rows() -> str:
    """Returns one line for each variable: its name, process, default, unit and text, separated by tabs."""
    found = [("Models", *row) for row in model_rows(MODEL_FIELDS)]
    found += [("Commands", *row) for row in COMMANDS]
    for process, settings in PROCESSES:
        told = comments(settings)
        for field, info in settings.model_fields.items():
            found.append((process, PREFIX + field.upper(), _default(info), _described(field, info, told)))
    lines = {name: (name, process, _plain(default), _unit_of(name), text) for process, name, default, text in found}
    lines |= {name: (name, "Commands", _plain(default), _unit_of(name), text) for name, default, text in COMMANDS}
    return "".join("\t".join(line) + "\n" for line in lines.values() if "_TEST_" not in line[0])


def _plain(default: str) -> str:
    """Returns a default without its backticks if the whole of it is one value; prose keeps them."""
    value = re.fullmatch(r"`([^`]*)`", default)
    return value[1] if value else default


def _unit_of(name: str) -> str:
    return UNITS.get(name.lower().rpartition("_")[2], "")


def comments(settings: type[pydantic.BaseModel]) -> dict[str, str]:
    """Returns the docstring below each field, by field name."""
    source = ast.parse(inspect.getsource(settings)).body[0]
    assert isinstance(source, ast.ClassDef)
    found = {}
    for field, below in zip(source.body, source.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _table(title: str, rows: Any) -> Iterator[str]:
    yield f"## {title}\n\n| variable | default | what it does |\n|---|---|---|"
    for name, default, text in rows:
        escaped = text.replace("|", "\\|")
        yield f"| `{name}` | {default} | {escaped} |"
    yield ""


def _default(info: pydantic.fields.FieldInfo) -> str:
    if info.is_required():
        return "must be set"
    default = info.get_default(call_default_factory=True)
    if default in (None, "", (), {}) or default is PydanticUndefined:
        return UNSET
    if isinstance(default, tuple):
        return f"`{','.join(map(str, default))}`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _described(field: str, info: pydantic.fields.FieldInfo, told: dict[str, str]) -> str:
    """Returns the text of a field. Names of settings in it are written as variables; its unit, choices and bounds
    follow."""
    text = re.sub(r"`(engine_[a-z_]+)`", lambda m: f"`{PREFIX}{m[1].upper()}`", told.get(field, ""))
    text = re.sub(r"\bNone:", "unset:", text)
    more = [*_unit(field), *_choices(info.annotation), *_bounds(info)]
    if more and text and text[-1] not in ".:":
        text += "."
    return " ".join([text, f"({'; '.join(more)})" if more else ""]).strip()


def _unit(field: str) -> Iterator[str]:
    unit = UNITS.get(field.rpartition("_")[2])
    if unit is not None:
        yield unit


def _choices(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        yield ", ".join(f"`{one}`" for one in typing.get_args(annotation))
    if annotation is bool:
        yield "`true`, `false`"


def _bounds(info: pydantic.fields.FieldInfo) -> Iterator[str]:
    bounds = {
        name: value
        for one in info.metadata
        for name in ("ge", "gt", "le", "lt")
        if (value := getattr(one, name, None)) is not None
    }
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    if bounds:
        yield ", ".join(f"{words[name]} {value}" for name, value in bounds.items())


if __name__ == "__main__":
    ROWS.write_text(rows())
    PAGE.write_text(page())
