"""The rows of the table about prices and what is due: `headgate prices`, `invoice`, `credits`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from accounting.values import periods
from gateway.cli import price_sheets
from gateway.cli.admin_commands import ONE_TENANT, argument, group, idempotency_key, option, row, several
from gateway.cli.answers import FIELDS, Grid, one_sentence, show
from gateway.cli.api import AdminApi, ApiFailed, segment
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.money import Amount, bill, cost, rule_of_tax, shown
from gateway.cli.price_sheets import EXAMPLE, RateParam
from gateway.cli.times import MOMENT
from gateway.cli.whole_file import whole_file

INVOICES_PATH = "/admin/v1/invoices"
DOCUMENTS = {
    "json": "application/json",
    "csv": "text/csv",
    "html": "text/html",
    "pdf": "application/pdf",
    "xml": "application/xml",
}


def _intervals(made: dict[str, Any]) -> Grid:
    columns = ("sheet", "from", "until")
    return Grid(columns, [[one[name] for name in columns] for one in made["intervals"]])


PRICES = group(
    "prices",
    "Manage price sheets: rates in the currency per million tokens, in force from a moment on. A version never"
    " changes.",
    row(
        "add SHEET",
        "Add the next version of SHEET, or a new sheet if there is none of that name. Prints its id.\n\n"
        "A version has the rates of all its models: a model that it does not name has no price.",
        "POST /admin/v1/price-sheets",
        several(
            "--rate",
            "rates",
            type=RateParam(),
            help="A model's interactive rates per million tokens: cached input, input kept in the cache, other input,"
            " output",
        ),
        several("--batch-rate", "batch_rates", type=RateParam(), help="A model's rates for batch lines, like --rate"),
        option(
            "--batch-percent",
            type=click.IntRange(0, 100),
            help="Make the batch rates of every model that is given none this percentage of its other ones, rounded up to"
            " micro-units, and print them.",
        ),
        option(
            "--file",
            type=click.File("rb"),
            help="JSON file with the whole version as the API takes it, in micro-units.",
        ),
        option("--currency", help="Currency of a new sheet.  [default: USD]"),
        option("--from", type=MOMENT, help="When the version begins.  [default: now]"),
        option("--until", type=MOMENT, help="When it ends.  [default: when the next version begins]"),
        shows=price_sheets.version_made,
        warns=lambda _, made: price_sheets.gaps(made["id"], made),
        reads=price_sheets.version_of,
        example=f"prices add standard --rate {EXAMPLE} --batch-percent 50",
    ),
    row(
        "list",
        "List every version of every sheet, the newest first.",
        "GET /admin/v1/price-sheets",
        shows=("id", "currency", "from", "until"),
    ),
    row(
        "show SHEET@VERSION",
        "Show all rates of one version.",
        "GET /admin/v1/price-sheets/{sheet}/{number}",
        argument("version", metavar="SHEET@VERSION"),
        shows=price_sheets.rates,
        reads=price_sheets.version_named,
        example="prices show standard@1",
    ),
    row(
        "assign TENANT SHEET",
        "Let TENANT pay by SHEET. Intervals of a tenant cannot overlap.",
        "PUT /admin/v1/tenants/{tenant}/price-sheet",
        option("--from", type=MOMENT, help="When it begins.  [default: now]"),
        option("--until", type=MOMENT, help="When the default sheet comes back.  [default: never]"),
        shows=_intervals,
        warns=lambda sent, made: price_sheets.gaps(sent["sheet"], made),
        example="prices assign acme standard --from 2026-11-01",
    ),
)


def _invoices(found: list[dict[str, Any]]) -> Grid:
    names, amounts = ("number", "project_name", "period", "state"), ("net", "tax", "due", "balance")
    rows = [
        (
            *(one[name] for name in names),
            *(bill(one[f"{name}_micro_units"], one["currency"]) for name in amounts),
            one["due_at"],
        )
        for one in found
    ]
    return Grid(("number", "tenant", "period", "state", *amounts, "due_at"), rows)


def _close(api: AdminApi, fields: dict[str, Any]) -> Any:
    """Closes a month. Where some tenants are refused, the invoices of the others are shown and the command fails."""
    if "tenant" in fields:
        fields["project_id"] = fields.pop("tenant")
    made = api.call("POST", INVOICES_PATH, fields)
    if refused := api.named(made.get("refused", [])):
        as_json = click.get_current_context().params["as_json"]
        if made["data"] or as_json:
            show(api.named(made["data"]), _closed, as_json)
        raise ApiFailed(" ".join(f"{one['tenant']}: {one['message']}" for one in refused), "conflict")
    return made["data"] if made["object"] == "list" else made


def _closed(made: list[dict[str, Any]] | dict[str, Any]) -> Grid | str:
    """Returns the invoices of all tenants, or the one of the tenant that was asked for."""
    if made:
        return _invoices(made if isinstance(made, list) else [made])
    period = click.get_current_context().params["period"]
    return (
        f"Nothing to close in {period}: nobody used anything in it, or its invoices were made before"
        f" (`headgate invoice list --period {period}`)."
    )


def _invoice(found: dict[str, Any]) -> tuple[Grid, Grid]:
    columns = ("kind", "period", "model", "tier", "token_class", "price_version", "quantity", "amount")
    currency = found["currency"]
    lines = [
        (*(line[name] for name in columns[:-1]), cost(line["amount_micro_units"], currency)) for line in found["lines"]
    ]
    sums = [(label, cost(found[f"{name}_micro_units"], currency)) for name, label in EXACT.items()]
    sums += [(label, bill(found[f"{name}_micro_units"], currency)) for name, label in PAYABLE.items()]
    facts = [("state", found["state"]), ("tax_rule", rule_of_tax(found["tax_rule"])), ("due_at", found["due_at"])]
    links = [(name, found[name]) for name in ("refers_to", "replaced_by", "note") if found[name]]
    return Grid(columns, lines), Grid(FIELDS, [*sums, *facts, *links])


EXACT = {
    "subtotal": "subtotal",
    "prepaid": "prepaid",
    "carried_in": "remainder carried in",
    "carried_out": "remainder carried on",
}
"""Sums to the micro-unit, with their labels."""
PAYABLE = {"net": "net", "tax": "tax", "paid": "paid by prepaid cash", "due": "due", "balance": "still open"}
"""Sums in whole units of the currency."""


KIND = click.option(
    "--format",
    "kind",
    type=click.Choice(list(DOCUMENTS)),
    default="pdf",
    show_default=True,
    help="Format of the document; xml is EN 16931 (Factur-X), which a complete PDF carries too.",
)


@click.command("export", epilog=example_text("invoice export INV-000001 --format html --out invoice.html"))
@click.argument("number")
@KIND
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; - is standard output.  [default: NUMBER.FORMAT]",
)
@home_option
def _export(number: str, kind: str, out: Path | None, home: Path) -> None:
    """Write the invoice NUMBER as a document, and print the name of the file."""
    with one_sentence():
        content = AdminApi(home).fetch(f"{INVOICES_PATH}/{segment(number)}", DOCUMENTS[kind])
    # A number from elsewhere never names a folder.
    _write(content, Path(f"{Path(number).name}.{kind}") if out is None else out)


def _write(content: bytes, out: Path) -> None:
    if out == Path("-"):
        sys.stdout.buffer.write(content)
        return
    with whole_file(out) as file:
        file.write(content)
    click.echo(out)


@click.command("preview", epilog=example_text("invoice preview acme --period 2026-10 --format pdf --out draft.pdf"))
@click.argument("tenant")
@click.option("--period", metavar="YYYY-MM", help="The month.  [default: the month of today, in UTC]")
@KIND
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a document, - to standard output.  [default: print the lines and what is due]",
)
@home_option
@json_option
def _preview(tenant: str, period: str | None, kind: str, out: Path | None, home: Path, as_json: bool) -> None:
    """Show the invoice that a close would make for TENANT of what is posted so far. Nothing is written."""
    with one_sentence():
        api = AdminApi(home)
        path = f"/admin/v1/tenants/{segment(api.billed(tenant))}/invoice-preview"
        path += f"?period={segment(period or periods.period_of(int(time.time())))}"
        if out is not None:
            _write(api.fetch(path, DOCUMENTS[kind]), out)
            return
        found = api.call("GET", path)
    show(found, _invoice, as_json)


INVOICE = group(
    "invoice",
    "Close a month into invoices, and read them. A closed invoice never changes: `headgate credits` corrects a charge,"
    " and `invoice void` issues it again.",
    row(
        "close",
        "Make one invoice for each tenant that has none yet, reconciled to every ledger row. Closing again with"
        " --tenant gives the same invoice.",
        _close,
        option("--period", required=True, metavar="YYYY-MM", help="Month; it closes 48 hours after its end."),
        option("--tenant", help="Id or name of the one tenant.  [default: all tenants that used something]"),
        shows=_closed,
        with_deleted=True,
        example="invoice close --period 2026-10",
    ),
    row(
        "list",
        "List invoices and credit notes, the newest first.",
        f"GET {INVOICES_PATH}",
        option("--tenant", help=ONE_TENANT),
        option("--period", metavar="YYYY-MM", help="The one month.  [default: all months]"),
        shows=_invoices,
        example="invoice list --tenant acme --period 2026-10",
    ),
    row(
        "show NUMBER",
        "Show the lines of the invoice NUMBER, and the amount that is due.",
        f"GET {INVOICES_PATH}/{{number}}",
        shows=_invoice,
        example="invoice show INV-000001",
    ),
    row(
        "pay NUMBER",
        "Record that the invoice NUMBER was paid, all that is open of it or AMOUNT.",
        f"POST {INVOICES_PATH}/{{number}}/payments",
        option("--amount", "amount_micro_units", type=Amount(positive=True), help="Amount.  [default: all]"),
        option("--reference", default="", help="Text of the transfer; the same one again is the same payment."),
        option("--paid-at", type=MOMENT, help="When it was paid.  [default: now]"),
        shows=_invoice,
        example="invoice pay INV-000001 --reference 'statement 17'",
    ),
    row(
        "void NUMBER",
        "Take back the invoice NUMBER by a credit note, and issue it again with the profiles of today.",
        f"POST {INVOICES_PATH}/{{number}}/void",
        option("--reason", required=True, help="Reason, which the credit note prints."),
        shows=_invoices,
        example="invoice void INV-000001 --reason 'wrong address'",
    ),
    _preview,
    _export,
)


def _credits(found: list[dict[str, Any]]) -> Grid:
    before, after = ("id", "type", "tenant"), ("priority", "expires_at", "corrects", "number")
    return Grid(
        (*before, "amount", "remaining", *after),
        [(*(one[name] for name in before), *_amounts(one), *(one[name] for name in after)) for one in found],
    )


def _amounts(credit: dict[str, Any]) -> tuple[str, str]:
    amounts = (credit["amount_micro_units"], credit["remaining_micro_units"])
    return shown(amounts[0], credit["currency"]), cost(amounts[1], credit["currency"])


_AMOUNT = argument("amount_micro_units", metavar="AMOUNT", type=Amount(positive=True))


_IDEMPOTENCY_KEY = idempotency_key("the same key never gives a credit twice")

CREDITS = group(
    "credits",
    "Give prepaid grants, and correct charged requests. Amounts are in the currency, like 25.00.",
    row(
        "grant TENANT AMOUNT",
        "Record that TENANT has prepaid AMOUNT. Closing a month uses grants before anything is due.",
        "POST /admin/v1/credits",
        _AMOUNT,
        option("--source", type=click.Choice(["cash", "promotion"]), default="cash", help="Where the money is from."),
        option(
            "--priority",
            type=click.IntRange(0, 1_000_000),
            default=100,
            help="Order of use: the grant with the lowest number is used first.",
        ),
        option("--currency", help="Currency of AMOUNT; another one than the tenant's is refused."),
        option(
            "--starts",
            "starts_at",
            type=MOMENT,
            help="Its time begins then: it pays whole hours, this one too.  [default: now]",
        ),
        option(
            "--expires",
            "expires_at",
            type=MOMENT,
            help="Its time ends then: it pays whole hours, this one too.  [default: never]",
        ),
        option("--note", default="", show_default=False, help="Text for the records."),
        _IDEMPOTENCY_KEY,
        fixed={"type": "grant"},
        shows="id",
        example="credits grant acme 50.00 --expires 2027-01-01",
    ),
    row(
        "correct TENANT REQUEST_ID AMOUNT",
        "Take back AMOUNT of the charge of the request REQUEST_ID to TENANT, by a credit note with its own number.",
        "POST /admin/v1/credits",
        argument("corrects", metavar="REQUEST_ID"),
        _AMOUNT,
        option(
            "--adjustment",
            "type",
            flag_value="adjustment",
            default="credit_note",
            show_default=False,
            help="Correct a charge that is on no invoice yet, by a line on the next one.",
        ),
        option("--note", default="", show_default=False, help="Text on the document."),
        _IDEMPOTENCY_KEY,
        shows="id",
        example="credits correct acme req_0123 1.50",
    ),
    row(
        "list",
        "List credits, the newest first, with the rest of each grant.",
        "GET /admin/v1/credits",
        option("--tenant", help=ONE_TENANT),
        shows=_credits,
    ),
)

COMMANDS: tuple[click.Command, ...] = (PRICES, INVOICE, CREDITS)
