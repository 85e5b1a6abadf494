"""`headgate certificates`: an authority and certificates for a small installation."""

from __future__ import annotations

from pathlib import Path

import click

from gateway.base.home import HomeError
from gateway.cli.answers import Grid, show
from gateway.cli.authority import Made, make
from gateway.cli.common import example_text, fail, json_option
from gateway.cli.exit_codes import USAGE


@click.command(
    epilog=example_text(
        "certificates pki --gateway --worker 10.0.0.5 --worker gpu2.internal\n"
        "certificates pki --listener llm.internal --renew"
    )
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--gateway", is_flag=True, help="Make the certificate that gateways show to workers.")
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="HOST",
    help="Make the certificate of the worker whose address has this host. Give the option again for each further host.",
)
@click.option(
    "--listener",
    "listeners",
    multiple=True,
    metavar="HOST",
    help="Make a certificate of the base URL for this host, in one file with those of further --listener.",
)
@click.option(
    "--days", default=365, show_default=True, type=click.IntRange(1, 3650), help="Time until the certificates end."
)
@click.option("--renew", is_flag=True, help="Replace certificates that are there, and their keys.")
@json_option
def certificates(
    directory: Path,
    gateway: bool,
    workers: tuple[str, ...],
    listeners: tuple[str, ...],
    days: int,
    renew: bool,
    as_json: bool,
) -> None:
    """Make an authority in DIRECTORY, unless it is there, and certificates that it signs.

    Keep ca.key in a safe place: who has it makes certificates that every gateway and worker trusts. The other files go to
    the hosts that need them: ca.pem everywhere, each certificate with its key to its own host. Processes read a replaced
    certificate within ten seconds.
    """
    if not (gateway or workers or listeners):
        fail("Say for whom: --gateway, --worker HOST or --listener HOST.", USAGE)
    try:
        made = make(directory, gateway=gateway, workers=workers, listeners=listeners, days=days, renews=renew)
    except HomeError as error:
        fail(str(error))
    show([_row(one) for one in made], lambda _: (_drawn(made),), as_json)


def _row(one: Made) -> dict[str, str]:
    return {"certificate": str(one.cert), "key": str(one.key), "for": one.purpose, "ends_at": one.ends_at.isoformat()}


def _drawn(made: list[Made]) -> Grid:
    rows = [(str(one.cert), str(one.key), one.purpose, f"{one.ends_at:%Y-%m-%d}") for one in made]
    return Grid(("certificate", "key", "for", "ends"), rows)


COMMANDS: tuple[click.Command, ...] = (certificates,)
