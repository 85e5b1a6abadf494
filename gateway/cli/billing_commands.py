"""The rows of the table about who bills and who is billed: `headgate issuer`, `headgate billing`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, get_args

import click

from accounting.terms.parties import MAX_LOGO_BYTES, MAX_PAYMENT_DAYS, Tax
from gateway.cli.admin_commands import OrNone, group, option, row
from gateway.cli.answers import FIELDS, Grid
from gateway.cli.money import rule_of_tax
from gateway.schema.money import percentage, tax_rate


class Percent(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A parameter type that reads `19` or `8.1` as millionths."""

    name = "PERCENT"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, int) or value == "none":
            return value
        try:
            return tax_rate(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Picture(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A parameter type that reads a file as base64."""

    name = "FILE"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "none":
            return value
        try:
            with Path(value).open("rb") as file:
                content = file.read(MAX_LOGO_BYTES + 1)
        except OSError as error:
            self.fail(f"{value!r} cannot be read: {error.strerror}.", param, ctx)
        if len(content) > MAX_LOGO_BYTES:
            self.fail(f"{value!r} has more than {MAX_LOGO_BYTES} bytes: make the picture smaller.", param, ctx)
        return base64.b64encode(content).decode()


def _profile(found: dict[str, Any]) -> Grid:
    given = {name: value for name, value in found.items() if value not in ("", None) and name != "object"}
    if "tax_rate" in given:
        given["tax_rate"] = f"{percentage(given['tax_rate'])} %"
    if (rule := given.get("tax_rule")) is not None:
        given["tax_rule"] = f"{rule_of_tax(rule)} ({'its own' if rule['owner'] == 'project' else 'that of the issuer'})"
        if "tax" not in given:
            del given["tax_rate"]  # that of no rule
    return Grid(FIELDS, list(given.items()))


ADDRESS = (
    option("--name", help="Name on documents."),
    option("--street", help="Street and number."),
    option("--street-more", help="Second line of the street."),
    option("--city", help="City or town."),
    option("--postal-code", help="Postal code."),
    option("--region", help="State or region."),
    option("--country", help="Two letters of ISO 3166, such as DE."),
    option("--vat-number", help="VAT number with its country in front, such as DE136695976; its digits are checked."),
    option("--tax-number", help="Number at the local tax office."),
    option("--company-number", help="Number in the register of companies."),
    option("--email", help="Mail address."),
    option("--phone", help="Phone number."),
)
TERMS = (
    option("--tax", type=click.Choice([*get_args(Tax), "none"]), help="Rule of tax."),
    option("--tax-rate", type=Percent(), help="Rate in percent, for the rule `standard`."),
    option("--tax-reason", help="Reason that is printed, such as that of an exemption."),
    option("--payment-days", type=OrNone(0, MAX_PAYMENT_DAYS), help="Days from the issue until payment is due."),
    option("--invoice-prefix", help="Prefix of invoice numbers, such as EU-; each prefix counts without a gap."),
    option("--credit-note-prefix", help="Prefix of credit note numbers, such as EU-CN-."),
)

ISSUER = group(
    "issuer",
    "Show and change who issues invoices. A closed invoice keeps the profile that it was issued with.",
    row("show", "Show the issuer's profile.", "GET /admin/v1/issuer", shows=_profile),
    row(
        "set",
        "Change the issuer's profile. Options that are not given stay; `none` sets the default.",
        "PATCH /admin/v1/issuer",
        *ADDRESS,
        option("--iban", help="IBAN of the account that is paid to; its check digits are checked."),
        option("--bic", help="BIC of its bank."),
        option("--account-name", help="Holder of the account.  [default: the name]"),
        option("--payment-note", help="Sentence about how to pay."),
        option("--logo", type=Picture(), help="PNG or JPEG file of at most 40 kB."),
        *TERMS,
        shows=_profile,
        partial=True,
        example="issuer set --name 'Example GmbH' --country DE --vat-number DE136695976 --tax standard --tax-rate 19",
    ),
)
BILLING = group(
    "billing",
    "Show and change how a tenant is billed: its address, its tax, its terms of payment.",
    row("show TENANT", "Show the billing profile of TENANT.", "GET /admin/v1/tenants/{tenant}/billing", shows=_profile),
    row(
        "set TENANT",
        "Change the billing profile of TENANT. Options that are not given stay; `none` sets the default.",
        "PATCH /admin/v1/tenants/{tenant}/billing",
        *ADDRESS,
        option("--purchase-order", help="Number of the customer's purchase order."),
        option("--buyer-reference", help="Reference that the customer wants on invoices."),
        *TERMS,
        shows=_profile,
        partial=True,
        example="billing set acme --country FR --vat-number FR40303265045 --tax reverse_charge --purchase-order 4711",
    ),
)

COMMANDS: tuple[click.Command, ...] = (ISSUER, BILLING)
