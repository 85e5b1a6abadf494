"""The check of all settings: those of the file, of the environment, and as each process reads them.

It starts no process to serve. The settings of workers and jobs are read by their own modules in processes of their own,
because nobody here imports those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from accounting.values import environment
from gateway.base.settings import ModelSource, SettingsError
from gateway.base.settings import load as load_gateway
from gateway.configuration import model_sources
from gateway.configuration.file import ConfigFile
from gateway.configuration.place import CONFIG, CONFIG_NAMES
from gateway.generation.served.model_files import check_names
from workers.process import refused_settings, setting_forms
from workers.process.refused_settings import Problem


def problems(file: ConfigFile | None, home: Path) -> list[Problem]:
    """Returns what is wrong, each setting once: names first, then values."""
    found: dict[tuple[str, str], Problem] = {}
    for problem in _all(file, home):
        # Several processes read the same setting. Its first problem is enough.
        found.setdefault((problem.setting, "" if problem.setting else problem.message), problem)
    return list(found.values())


def of_error(error: SettingsError, source: str = "environment") -> list[Problem]:
    """Returns the problems that a `SettingsError` is about."""
    return list(error.problems) or [Problem("", source, None, str(error))]


def _all(file: ConfigFile | None, home: Path) -> Iterator[Problem]:
    unknown = environment.unknown(os.environ)
    if unknown is not None:
        named = next((word.rstrip(".") for word in unknown.split() if word.startswith("HEADGATE_")), "")
        yield Problem(named, "environment", os.environ.get(named), unknown)
    given = setting_forms.given(os.environ)
    base = {name: value for name, value in given.items() if name not in (CONFIG, CONFIG_NAMES)}
    environ = {**base, **(file.added_to(base) if file else {})}
    yield from refused_settings.refused(setting_forms.COMMANDS, environ)
    environ.setdefault("HEADGATE_HOME", str(home))
    try:
        load_gateway(environ)
        if file is not None:
            check_names(
                {name: ModelSource.model_validate({"path": "/", **one.source}) for name, one in file.models.items()},
                model_sources.foreign(environ),
            )
    except SettingsError as error:
        yield from of_error(error, "environment" if file is None else str(file.path))
    yield from _paths(file)
    needed = {"HEADGATE_URL": "http://localhost", "HEADGATE_BROKER_URL": "memory://", "HEADGATE_MODEL": "any"}
    environ = {**needed, **environ}
    yield from _of_process("workers.jobs.base.settings", environ)
    yield from _of_process("workers.engine.settings", environ)
    yield from _of_models(file, environ)


def _paths(file: ConfigFile | None) -> Iterator[Problem]:
    for name, entry in {} if file is None else file.models.items():
        path = entry.told.path
        if file is not None and path.startswith("/") and not Path(path, "config.json").is_file():
            message = (
                f"models.{name}.path is {path}, which is not a directory with a config.json: name another, or a hub id."
            )
            yield Problem(f"models.{name}.path", str(file.path), path, message)


def _of_models(file: ConfigFile | None, environ: Mapping[str, str]) -> Iterator[Problem]:
    for name, entry in {} if file is None else file.models.items():
        if own := entry.added_to(environ):
            for problem in _of_process("workers.engine.settings", {**environ, **own}):
                if problem.setting in own:
                    key = problem.setting.removeprefix(refused_settings.PREFIX).lower()
                    said = f"models.{name}: {problem.message}"
                    yield replace(problem, setting=f"models.{name}.{key}", message=said)
                else:
                    yield problem


def _of_process(module: str, environ: Mapping[str, str]) -> Iterator[Problem]:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, env=environ, check=False)
    if done.returncode == os.EX_CONFIG:
        found = [Problem(**one) for one in json.loads(done.stdout or "[]")]
        yield from found or [Problem("", "environment", None, done.stderr.strip())]
