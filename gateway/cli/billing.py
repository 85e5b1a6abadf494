"""`headgate invoice` and `headgate credits`: closed periods and credits, over HTTP."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import click

from gateway.cli.admin import one_sentence, print_rows, show
from gateway.cli.api import AdminApi
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.money import Amount, shown
from gateway.cli.times import MOMENT
from gateway.cli.whole_file import whole_file
from gateway.schema.money import decimal

INVOICES, CREDITS = "/admin/v1/invoices", "/admin/v1/credits"
TYPES = {"json": "application/json", "csv": "text/csv", "html": "text/html", "pdf": "application/pdf"}
COLUMNS = ("number", "project_name", "period", "currency", "subtotal", "prepaid", "total")


@click.group(cls=Commands)
def invoice() -> None:
    """Close a month into invoices, and read them. A closed invoice never changes; `headgate credits` corrects it."""


@invoice.command("close")
@click.option("--period", required=True, metavar="YYYY-MM", help="A month; it closes 48 h after its end.")
@click.option("--tenant", help="Id or name.  [default: all that used something]")
@home_option
@json_option
def close(period: str, tenant: str | None, home: Path, as_json: bool) -> None:
    """Make one invoice for each tenant that has none yet, reconciled to every ledger row. Closing again with --tenant
    gives the same invoice.
    """
    with one_sentence():
        api = AdminApi.of(home)
        if tenant is not None:
            body = {"period": period, "project_id": api.project(tenant)["id"]}
            made = api.call("POST", INVOICES, body)
            _print(made, [made], as_json)
            return
        answer = api.call("POST", INVOICES, {"period": period})
        if not (answer["data"] or as_json):
            click.echo(
                f"Nothing to close in {period}: nobody used anything in it, or its invoices were made before"
                f" (`headgate invoice list --period {period}`)."
            )
            return
        _print(answer["data"], answer["data"], as_json)


@invoice.command("list")
@click.option("--tenant", help="Id or name.  [default: all]")
@click.option("--period", metavar="YYYY-MM")
@home_option
@json_option
def list_invoices(tenant: str | None, period: str | None, home: Path, as_json: bool) -> None:
    """List invoices and credit notes, the newest first."""
    with one_sentence():
        api = AdminApi.of(home)
        params = {"project_id": tenant and api.project(tenant)["id"], "period": period}
        found = api.every(INVOICES, {k: v for k, v in params.items() if v is not None})
        _print(found, found, as_json)


@invoice.command("show")
@click.argument("number")
@home_option
@json_option
def show_invoice(number: str, home: Path, as_json: bool) -> None:
    """Show the lines of NUMBER, and the amount that is due."""
    with one_sentence():
        found = AdminApi.of(home).call("GET", f"{INVOICES}/{number}")
        columns = ("kind", "period", "model", "tier", "token_class", "price_version", "quantity", "amount")
        currency = found["currency"]
        lines = [
            (*(line[name] for name in columns[:-1]), shown(line["amount_micro_units"], currency))
            for line in found["lines"]
        ]
        due = ("total", *("" for _ in columns[2:]), shown(found["total_micro_units"], currency))
        print_rows(found, as_json, columns, [*lines, due])


@invoice.command("export")
@click.argument("number")
@click.option("--format", "kind", type=click.Choice(list(TYPES)), default="pdf", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="[default: NUMBER.FORMAT; - is standard output]"
)
@home_option
def export(number: str, kind: str, out: Path | None, home: Path) -> None:
    """Write NUMBER as a document."""
    with one_sentence():
        content = AdminApi.of(home).fetch(f"{INVOICES}/{number}", TYPES[kind])
    if out == Path("-"):
        sys.stdout.buffer.write(content)
        return
    path = Path(f"{number}.{kind}") if out is None else out
    with whole_file(path) as file:
        file.write(content)
    click.echo(path)


@click.group(cls=Commands)
def credits() -> None:
    """Give prepaid grants, and correct charged requests. Amounts are the currency's, like 25.00."""


@credits.command("grant")
@click.argument("tenant")
@click.argument("amount", type=Amount(positive=True))
@click.option("--source", type=click.Choice(["cash", "promotion"]), default="cash", show_default=True)
@click.option(
    "--priority", type=click.IntRange(0, 1_000_000), default=100, show_default=True, help="The lowest is used first."
)
@click.option("--currency", default="USD", show_default=True)
@click.option("--starts", type=MOMENT, help="Usage from then on is paid.  [default: now]")
@click.option("--expires", type=MOMENT, help="Usage until then is paid.  [default: never]")
@click.option("--note", default="")
@click.option("--idempotency-key", help="The same key never grants twice.  [default: a new one]")
@home_option
@json_option
def grant(
    tenant: str,
    amount: int,
    starts: int | None,
    expires: int | None,
    idempotency_key: str | None,
    home: Path,
    as_json: bool,
    **fields: Any,
) -> None:
    """Record that TENANT (id or name) has prepaid AMOUNT: closes use grants before anything is due."""
    times = {k: v for k, v in {"starts_at": starts, "expires_at": expires}.items() if v is not None}
    body = {"type": "grant", "amount_micro_units": amount, **fields, **times}
    _give(home, tenant, body, idempotency_key, as_json)


@credits.command("correct")
@click.argument("tenant")
@click.argument("request_id")
@click.argument("amount", type=Amount(positive=True))
@click.option("--adjustment", is_flag=True, help="Of a charge that is on no invoice yet: a line on the next one.")
@click.option("--note", default="", help="On the document.")
@click.option("--idempotency-key", help="The same key never credits twice.  [default: a new one]")
@home_option
@json_option
def correct(
    tenant: str,
    request_id: str,
    amount: int,
    adjustment: bool,
    note: str,
    idempotency_key: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Take back AMOUNT of the charge of REQUEST_ID to TENANT (id or name), by a credit note with its own number."""
    kind = "adjustment" if adjustment else "credit_note"
    body = {"type": kind, "amount_micro_units": amount, "corrects": request_id, "note": note}
    _give(home, tenant, body, idempotency_key, as_json)


@credits.command("list")
@click.option("--tenant", help="Id or name.  [default: all]")
@home_option
@json_option
def list_credits(tenant: str | None, home: Path, as_json: bool) -> None:
    """List credits, the newest first, with the rest of each grant."""
    with one_sentence():
        api = AdminApi.of(home)
        found = api.every(CREDITS, {} if tenant is None else {"project_id": api.project(tenant)["id"]})
        columns = (
            "id",
            "type",
            "project_id",
            "currency",
            "amount",
            "remaining",
            "priority",
            "expires_at",
            "corrects",
            "number",
        )
        rows = [
            (
                c["id"],
                c["type"],
                c["project_id"],
                c["currency"],
                decimal(c["amount_micro_units"], 2),
                "" if c["remaining_micro_units"] is None else decimal(c["remaining_micro_units"], 2),
                c["priority"],
                c["expires_at"],
                c["corrects"],
                c["number"],
            )
            for c in found
        ]
        print_rows(found, as_json, columns, rows)


def _give(home: Path, tenant: str, body: dict[str, Any], key: str | None, as_json: bool) -> None:
    with one_sentence():
        api = AdminApi.of(home)
        headers = {"idempotency-key": key or str(uuid.uuid4())}
        body["project_id"] = api.project(tenant)["id"]
        show(api.call("POST", CREDITS, body, headers=headers), as_json, "id")


def _print(value: Any, found: list[dict[str, Any]], as_json: bool) -> None:
    rows = [
        (*(i[name] for name in COLUMNS[:4]), *(decimal(i[f"{name}_micro_units"], 2) for name in COLUMNS[4:]))
        for i in found
    ]
    print_rows(value, as_json, COLUMNS, rows)


COMMANDS: tuple[click.Command, ...] = (invoice, credits)
