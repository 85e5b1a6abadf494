"""What every subcommand shares: `--home`, `--json`, and one clear sentence with a non-zero exit."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from gateway.cli.home import default_home

home_option = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_home,
    show_default="$HEADGATE_HOME, else ~/.headgate",
    help="State directory: database, keys, journals, sockets.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
end_streams_option = click.option(
    "--end-streams", is_flag=True, help="What runs now ends too, within 5 seconds."
)


def revoking(end_streams: bool) -> dict[str, str]:
    """The query that asks for it."""
    return {"revoke": "immediate"} if end_streams else {}


def fail(message: str) -> NoReturn:
    click.echo(f"headgate: {message}", err=True)
    raise SystemExit(1)
