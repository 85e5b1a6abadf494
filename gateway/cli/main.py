"""The `headgate` command. Other processes are started by exec; `up` forks some of them."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from accounting.values import environment
from gateway.base.home import Home, HomeError, default_home
from gateway.base.output_formats import TOOL_FORMATS
from gateway.cli.common import HOME, WORDS, example_text, fail, home_option
from gateway.cli.ending import closed_by_reader, ended
from gateway.cli.exit_codes import CONFIG as UNUSABLE
from gateway.cli.groups import Commands
from gateway.cli.late_commands import LATE_COMMANDS, SUMMARIES
from gateway.cli.options import option, without
from gateway.cli.progress import progress
from gateway.configuration.place import CONFIG, find
from workers.process import refused_settings, setting_forms

if TYPE_CHECKING:
    from gateway.cli.model import WantedModel

REPORTERS = ("config", "doctor", "completion")
"""These commands work with settings that cannot be used: the first two report all faults themselves."""
SETTINGS_FROM = "It reads its settings from HEADGATE_… variables."
TENSOR_PARALLEL = "HEADGATE_ENGINE_TENSOR_PARALLEL"

tensor_parallel_option = click.option(
    "--tensor-parallel",
    envvar=TENSOR_PARALLEL,
    metavar="N",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of processes over which each copy of the model is split, on N GPUs or this CPU's cores.",
)


CONFIG_OPTION = "headgate.config"
"""The key of a command's context under which the settings file stands as it was typed."""
DRAFT_MODEL = "HEADGATE_ENGINE_DRAFT_MODEL"

draft_model_option = click.option(
    "--draft-model",
    metavar="PATH_OR_HUB_ID",
    help="A small model with the same vocabulary. It proposes tokens, which the large model checks several at a time."
    "  [default: no draft model]",
)


class _Commands(Commands):
    """Imports late commands when they are asked for, in singular and plural. Whatever goes wrong is one sentence in all
    of them.
    """

    shows_options = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Takes `--config` from wherever it stands, and the home that decides where the file is searched."""
        ctx.meta[CONFIG_OPTION], ctx.meta[HOME] = option(args, "--config"), option(args, "--home")
        ctx.meta[WORDS] = tuple(args)
        return super().parse_args(ctx, without(args, "--config"))

    def main(self, args: Sequence[str] | None = None, *more: Any, **named: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        ended(lambda: super(_Commands, self).main(words, *more, **{**named, "standalone_mode": False}), words)

    def invoke(self, ctx: click.Context) -> Any:
        return closed_by_reader(lambda: super(_Commands, self).invoke(ctx))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *LATE_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LATE_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"gateway.cli.{LATE_COMMANDS[cmd_name]}")
        found: dict[str, click.Command] = {command.name: command for command in module.COMMANDS}
        return found[cmd_name]

    def summary(self, ctx: click.Context, name: str) -> str | None:
        return SUMMARIES.get(name) or super().summary(ctx, name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        # `worker` starts one; `workers` are those that are linked.
        name = args[0] if args[0] in self.commands else _in_full(args[0])
        return super().resolve_command(ctx, [name, *args[1:]])


def _in_full(name: str) -> str:
    """Returns a late command's own name. The other commands start processes, and have one name each."""
    forms = (name, f"{name}s", f"{name}es", name.removesuffix("s"), name.replace("model-", "models-"))
    return next((form for form in forms if form in LATE_COMMANDS), name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(importlib.metadata.version("headgate"), prog_name="headgate")
@click.option("--config", metavar="FILE", help="Settings file.  [default: headgate.toml in the home, else here]")
@click.pass_context
def main(ctx: click.Context, config: str | None) -> None:
    """Headgate is a multi-tenant LLM server with exact metering. `headgate up` starts everything."""
    for name in [name for name, value in os.environ.items() if not setting_forms.is_given(name, value)]:
        del os.environ[name]
    if ctx.invoked_subcommand in REPORTERS:
        return
    if (unknown := environment.unknown(os.environ)) is not None:
        fail(unknown, UNUSABLE)
    path = config_path(ctx)
    if path is not None:
        from gateway.base.settings import SettingsError
        from gateway.cli import configuration

        try:
            configuration.load(path)
        except SettingsError as error:
            fail(str(error), UNUSABLE)
    problem = next(refused_settings.refused(setting_forms.COMMANDS, os.environ), None)
    if problem is not None:
        fail(problem.message, UNUSABLE)


@main.command(epilog=example_text("up --model Qwen/Qwen3-0.6B --port 8080"))
@home_option
@click.option(
    "--host",
    envvar="HEADGATE_HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address that the base URL listens on.",
)
@click.option(
    "--port",
    envvar="HEADGATE_PORT",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port of the base URL; 0 takes any free port.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]PATH_OR_HUB_ID",
    help="Model to serve: a directory or hub id of a Hugging Face causal LM. Give the option again for each further"
    " model.  [env var: HEADGATE_MODEL, for one; default: the demo model]",
)
@click.option(
    "--tool-format",
    "tool_formats",
    multiple=True,
    metavar="[MODEL=]FORMAT",
    help="Format in which a model writes tool calls, where its chat template does not show it: one of "
    f"{', '.join(TOOL_FORMATS)}. Give the option again for each further model.  [default: `tool_format` of headgate.toml,"
    " else found from the chat template]",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    help="Number of workers of each model; each has a copy of the model.  [default: 1, or `replicas` of headgate.toml]",
)
@click.option(
    "--threads",
    envvar="HEADGATE_THREADS",
    type=click.IntRange(min=1),
    help="Number of threads of each worker on this CPU. One fewer than there are cores keeps answers steady under load"
    " from many clients, but makes them slower.  [default: all cores, shared among the workers]",
)
@tensor_parallel_option
@click.option(
    "--gateways",
    envvar="HEADGATE_GATEWAYS",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of gateway processes; they share the port.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file that is written as soon as a request would succeed.",
)
@click.option("--no-migrate", is_flag=True, help="Refuse an older database schema instead of upgrading it.")
@draft_model_option
@click.pass_context
def up(
    ctx: click.Context,
    home: Path,
    host: str,
    port: int,
    models: tuple[str, ...],
    tool_formats: tuple[str, ...],
    workers: int | None,
    threads: int | None,
    tensor_parallel: int,
    gateways: int,
    ready_file: Path | None,
    no_migrate: bool,
    draft_model: str | None,
) -> None:
    """Start the gateway, workers, jobs and embedded services of this machine. Ctrl-C drains and stops them."""
    from gateway.base import settings
    from gateway.base.settings import SettingsError
    from gateway.cli.start_checks import refuse_new_secrets, refuse_taken_address
    from gateway.cli.supervisor import ChildFailed, ChildRefused
    from gateway.cli.up import Options, run

    _propose_from(draft_model)
    # What a start makes is kept: looking through it for garbage again and again finds little.
    gc.disable()
    try:
        told = settings.load({**os.environ, "HEADGATE_HOME": str(home)})  # a gateway would refuse them, but later
        options = Options(
            home=Home(home),
            host=host,
            port=port,
            models=_wanted(ctx, models, workers, tool_formats),
            models_again=lambda: _wanted(ctx, models, workers, tool_formats),
            num_threads=threads,
            tensor_parallel=tensor_parallel,
            num_gateways=gateways,
            tls=told.tls_files,
            drain_s=told.drain_grace_s + told.drain_s,
            ready_file=ready_file,
            database_url=os.environ.get("HEADGATE_DATABASE_URL"),
            redis_url=os.environ.get("HEADGATE_REDIS_URL"),
            migrate=not no_migrate,
        )
        refuse_new_secrets(options.home, options.database_url or options.home.database_url)
        refuse_taken_address(options.home, host, port)
        options.home.prepare()
        asyncio.run(run(options))
    except (SettingsError, ChildRefused) as error:
        fail(str(error), UNUSABLE)
    except (HomeError, ChildFailed) as error:
        fail(str(error))
    finally:
        gc.enable()


@main.command()
@home_option
@click.option("--check", is_flag=True, help="Change nothing; say whether the schema is current.")
@click.option(
    "--check-models",
    is_flag=True,
    help="Change nothing; say whether migrations and tables in the code agree. For developers.",
)
def migrate(home: Path, check: bool, check_models: bool) -> None:
    """Upgrade the database schema to the version of this program."""
    from accounting.database import migrate as migrations
    from gateway.cli.start_checks import refuse_new_secrets

    url = os.environ.get("HEADGATE_DATABASE_URL") or Home(home).database_url
    try:
        if check_models:
            migrations.check_models()
            click.echo("Migrations and models agree.")
        elif check:
            if "HEADGATE_DATABASE_URL" not in os.environ:
                Home(home).refuse_absent()
            migrations.check(url)
            click.echo("The schema is current.")
        else:
            refuse_new_secrets(Home(home), url)
            Home(home).prepare()
            with progress("Migrating the database") as told:
                migrations.upgrade(url, told=told)
            click.echo("The schema is current.")
    except HomeError as error:
        fail(str(error))


def config_path(ctx: click.Context) -> Path | None:
    """Returns the settings file of this command line, if there is one."""
    home = ctx.meta[HOME]
    try:
        where = Path(home).expanduser() if home else default_home()
    except HomeError:
        return None  # the command says what is wrong with its home
    return find(where, Path.cwd(), ctx.meta[CONFIG_OPTION] or os.environ.get(CONFIG))


def _wanted(
    ctx: click.Context, given: tuple[str, ...], num_workers: int | None, tool_formats: tuple[str, ...]
) -> tuple[WantedModel, ...]:
    """Returns the models to serve: those of the flags, else that of the environment, else those of the file, which is
    read again. Raises `HomeError` or `SettingsError`.
    """
    from gateway.cli.configuration import wanted
    from gateway.cli.model import with_tool_formats
    from gateway.configuration.file import read

    path, named = config_path(ctx), os.environ.get("HEADGATE_MODEL")
    models = wanted(read(path) if path is not None else None, given or ((named,) if named else ()), num_workers)
    return with_tool_formats(models, tool_formats)


def _propose_from(draft_model: str | None) -> None:
    """Sets the draft model in the environment, because workers read their settings from it."""
    if draft_model is not None:
        os.environ[DRAFT_MODEL] = draft_model
        os.environ.setdefault("HEADGATE_ENGINE_SPECULATE", "draft")


def _become(module: str, home: Path) -> NoReturn:
    os.environ["HEADGATE_HOME"] = str(home)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module])  # noqa: S606 - the interpreter itself, fixed module


def _process(name: str, module: str, summary: str) -> None:
    @main.command(name, help=f"{summary} {SETTINGS_FROM}")
    @home_option
    def command(home: Path) -> None:
        _become(module, home)


@main.command(help=f"Run one worker: one process, or one for each of its GPUs. {SETTINGS_FROM}")
@home_option
@click.option("--model", metavar="NAME", help="Model of headgate.toml, or a directory or hub id.")
@tensor_parallel_option
@draft_model_option
@click.pass_context
def worker(ctx: click.Context, home: Path, model: str | None, tensor_parallel: int, draft_model: str | None) -> None:
    named = model or os.environ.get("HEADGATE_MODEL")
    if CONFIG in os.environ:
        from gateway.cli.configuration import current, worker_env

        try:
            os.environ.update(worker_env(current(), named))
        except HomeError as error:
            fail(str(error), UNUSABLE)
    elif named:
        os.environ["HEADGATE_MODEL"] = named
    _propose_from(draft_model)  # flags win over the model's own settings
    if ctx.get_parameter_source("tensor_parallel") is ParameterSource.COMMANDLINE:
        os.environ[TENSOR_PARALLEL] = str(tensor_parallel)
    os.environ.setdefault(TENSOR_PARALLEL, str(tensor_parallel))
    _become("workers.engine", home)


@main.command(help=f"Run one gateway process. {SETTINGS_FROM}")
@home_option
def gateway(home: Path) -> None:
    if CONFIG in os.environ and not os.environ.keys() & {"HEADGATE_MODELS", "HEADGATE_MODELS_FILE"}:
        from gateway.cli.configuration import current

        file = current()
        if file is not None and file.models:
            os.environ["HEADGATE_MODELS_FILE"] = str(file.path)
    _become("gateway", home)


_process("jobs", "workers.jobs", "Run the jobs process (Celery worker and sweeper).")
