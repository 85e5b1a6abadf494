"""`headgate prefixes`: prompts published to all tenants. The command uses the same HTTP API as any program of the
operator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gateway.cli.admin import one_sentence, show, table
from gateway.cli.api import AdminApi
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands

PATH = "/admin/v1/prefixes"


@click.group(cls=Commands)
def prefixes() -> None:
    """Publish system prompts: computed once per worker, cached for every tenant."""


@prefixes.command("add")
@click.argument("model")
@click.option("--system", help="Text of a system message.")
@click.option("--system-file", type=click.File(encoding="utf-8"), help="File with it; - reads standard input.")
@click.option("--text", help="Beginning of a prompt for /v1/completions instead.")
@click.option("--name", default="Public prefix", show_default=True)
@click.option("--ttl-s", type=click.IntRange(min=1), help="Seconds from now.  [default: for good]")
@home_option
@json_option
def add(
    model: str,
    system: str | None,
    system_file: Any,
    text: str | None,
    name: str,
    ttl_s: int | None,
    home: Path,
    as_json: bool,
) -> None:
    """Publish a prompt of MODEL. Only publish what every tenant may know: a request that begins with it is cheaper."""
    given = [value for value in (system, system_file, text) if value is not None]
    if len(given) != 1:
        raise click.UsageError("Give one of --system, --system-file and --text.")
    body: dict[str, Any] = {"model": model, "name": name, "ttl_s": ttl_s}
    if text is not None:
        body["text"] = text
    else:
        content = system if system is not None else system_file.read()
        body["messages"] = [{"role": "system", "content": content}]
    with one_sentence():
        show(AdminApi.of(home).call("POST", PATH, body), as_json, "id")


@prefixes.command("list")
@home_option
@json_option
def list_prefixes(home: Path, as_json: bool) -> None:
    """List prefixes, the newest first; `pinned` means that every worker has it."""
    with one_sentence():
        columns = ("id", "name", "model", "num_tokens", "state", "expires_at")
        table(AdminApi.of(home).every(PATH), as_json, columns)


@prefixes.command("delete")
@click.argument("prefix_id")
@home_option
@json_option
def delete(prefix_id: str, home: Path, as_json: bool) -> None:
    """Delete a prefix. From the next request on it is private text like any other."""
    with one_sentence():
        show(AdminApi.of(home).call("DELETE", f"{PATH}/{prefix_id}"), as_json, "id")


COMMANDS: tuple[click.Command, ...] = (prefixes,)
