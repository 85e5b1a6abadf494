"""The issuer, the customer, and the rule of tax between them. The module is pure: values and their checks.

Addresses, tax numbers and bank details are printed and put into XML, so every text is one line that shows what it says:
no control character and no character that changes the direction of the text around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import msgspec

from accounting.terms.amounts import WHOLE
from accounting.values import texts
from accounting.values.errors import InvalidError

Tax = Literal["standard", "zero", "exempt", "reverse_charge", "intra_community", "export", "not_subject"]
CODES: dict[str, str] = {
    "standard": "S",
    "zero": "Z",
    "exempt": "E",
    "reverse_charge": "AE",
    "intra_community": "K",
    "export": "G",
    "not_subject": "O",
}
"""The tax categories of EN 16931 (UNTDID 5305)."""
REASONS = {
    "reverse_charge": "Reverse charge: the customer owes the tax",
    "intra_community": "Intra-Community supply",
    "export": "Export outside the EU",
    "not_subject": "Not subject to VAT",
}
"""The reason that a document prints if the rule has no reason of its own."""
OWED_BY_CUSTOMER = ("reverse_charge", "intra_community")
MAX_CHARS = 200
MAX_PAYMENT_DAYS = 365
MAX_LOGO_BYTES = 40_000
_PREFIX = re.compile(r"([A-Z0-9]+-){1,4}")
MAX_PREFIX_CHARS = 20
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_NUMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ./&*+-]{1,49}")


class Party(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str = ""
    street: str = ""
    street_more: str = ""
    city: str = ""
    postal_code: str = ""
    region: str = ""
    country: str = ""
    """Two letters of ISO 3166-1."""
    vat_number: str = ""
    """The number with its country in front, such as DE136695976."""
    tax_number: str = ""
    """The number at the local tax office."""
    company_number: str = ""
    """The number in the register of companies."""
    email: str = ""
    phone: str = ""


class TaxRule(msgspec.Struct, frozen=True, kw_only=True):
    tax: Tax
    rate: int
    """Millionths of the net amount: 190000 is 19 %."""
    reason: str

    @property
    def code(self) -> str:
        return CODES[self.tax]


class Issuer(Party, frozen=True, kw_only=True, omit_defaults=True):
    iban: str = ""
    bic: str = ""
    account_name: str = ""
    payment_days: int = 30
    payment_note: str = ""
    invoice_prefix: str = "INV-"
    credit_note_prefix: str = "CN-"
    logo: str = ""
    """The SHA-256 of the picture; empty for none."""
    tax: Tax = "not_subject"
    """The rule of every tenant that has none of its own."""
    tax_rate: int = 0
    tax_reason: str = ""


class Customer(Party, frozen=True, kw_only=True, omit_defaults=True):
    purchase_order: str = ""
    buyer_reference: str = ""
    payment_days: int | None = None
    """The issuer's if it is None."""
    invoice_prefix: str = ""
    """The issuer's if it is empty. Each prefix counts from 1 without a gap."""
    credit_note_prefix: str = ""
    tax: Tax | None = None
    """The issuer's rule if it is None."""
    tax_rate: int = 0
    tax_reason: str = ""


P = TypeVar("P", Issuer, Customer)


def tax_rule(issuer: Issuer, customer: Customer) -> TaxRule:
    whose = issuer if customer.tax is None else customer
    assert whose.tax is not None
    return TaxRule(tax=whose.tax, rate=whose.tax_rate, reason=whose.tax_reason or REASONS.get(whose.tax, ""))


def checked(profile: P) -> P:
    """Returns the profile with its numbers in their usual spelling. Raises InvalidError that names the field."""
    for name, value in msgspec.structs.asdict(profile).items():
        if isinstance(value, str):
            _check_text(name, value)
    _check_rule(profile)
    if profile.payment_days is not None and not 0 <= profile.payment_days <= MAX_PAYMENT_DAYS:
        raise InvalidError(f"Payment days are 0 to {MAX_PAYMENT_DAYS}, not {profile.payment_days}.", "payment_days")
    spelled = {name: spell(getattr(profile, name)) for name, spell in _SPELLED.items() if getattr(profile, name, "")}
    if isinstance(profile, Issuer) and profile.invoice_prefix == profile.credit_note_prefix:
        raise InvalidError("Invoices and credit notes need different prefixes.", "credit_note_prefix")
    if profile.invoice_prefix and profile.invoice_prefix == profile.credit_note_prefix:
        raise InvalidError("Invoices and credit notes need different prefixes.", "credit_note_prefix")
    return msgspec.structs.replace(profile, **spelled)


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_CHARS:
        raise InvalidError(f"{name} has {len(text)} characters; at most {MAX_CHARS} fit on a document.", name)
    texts.refuse_hidden(text, name)
    if text and not text.strip():
        raise InvalidError(f"{name} is blank.", name)


def _check_rule(profile: Issuer | Customer) -> None:
    if profile.tax is not None and profile.tax not in get_args(Tax):
        raise InvalidError(f"{profile.tax!r} is not a rule of tax: {', '.join(CODES)}.", "tax")
    if not 0 <= profile.tax_rate <= WHOLE:
        raise InvalidError("A tax rate is 0 to 100 percent.", "tax_rate")
    if (profile.tax == "standard") != (profile.tax_rate > 0):
        raise InvalidError("The rule `standard`, and only that one, has a tax rate above 0.", "tax_rate")
    if profile.tax == "exempt" and not profile.tax_reason:
        raise InvalidError("An exemption needs its reason, which is printed.", "tax_reason")
    if profile.tax in OWED_BY_CUSTOMER:
        if isinstance(profile, Issuer):
            raise InvalidError("This rule depends on the customer: set it for a tenant.", "tax")
        if not profile.vat_number:
            raise InvalidError("Under this rule the customer's VAT number is printed: set it too.", "vat_number")


def _country(text: str) -> str:
    import pycountry

    found = pycountry.countries.get(alpha_2=text.upper())
    if found is None:
        raise InvalidError(f"{text!r} is not a country of ISO 3166, such as DE or JP.", "country")
    return text.upper()


def _vat_number(text: str) -> str:
    """Checks the digits by the rules of the number's country, where they are known."""
    from stdnum import get_cc_module
    from stdnum.exceptions import ValidationError

    number = text.upper()
    country = "GR" if number.startswith("EL") else number[:2]
    if not _NUMBER.fullmatch(number) or not country.isalpha():
        raise InvalidError(f"{text!r} is no VAT number: it begins with its country, as in DE136695976.", "vat_number")
    _country(country)
    module = get_cc_module(country.lower(), "vat")
    if module is None:
        return number
    try:
        short = module.validate(number)
    except ValidationError:
        raise InvalidError(f"{text!r} is no VAT number of {country}: a digit is wrong.", "vat_number") from None
    return short if short.startswith(number[:2]) else number[:2] + short


def _iban(text: str) -> str:
    from stdnum import iban
    from stdnum.exceptions import ValidationError

    try:
        return str(iban.validate(text))
    except ValidationError:
        raise InvalidError(f"{text!r} is not an IBAN: its check digits do not fit.", "iban") from None


def _bic(text: str) -> str:
    from stdnum import bic
    from stdnum.exceptions import ValidationError

    try:
        return str(bic.validate(text))
    except ValidationError:
        raise InvalidError(f"{text!r} is no BIC, such as DEUTDEFF.", "bic") from None


def _prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text) or len(text) > MAX_PREFIX_CHARS:
        raise InvalidError(
            f"{text!r} is not a prefix: capital letters and digits, with - at its end, as in EU-.", "prefix"
        )
    return text


def _email(text: str) -> str:
    if not _EMAIL.fullmatch(text):
        raise InvalidError(f"{text!r} is not a mail address.", "email")
    return text


def _plain_number(name: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not _NUMBER.fullmatch(text):
            raise InvalidError(f"{name} is 2 to 50 letters, digits, spaces and . / & * + -.", name)
        return text

    return check


_SPELLED: dict[str, Callable[[str], str]] = {
    "country": _country,
    "vat_number": _vat_number,
    "tax_number": _plain_number("tax_number"),
    "company_number": _plain_number("company_number"),
    "iban": _iban,
    "bic": _bic,
    "email": _email,
    "invoice_prefix": _prefix,
    "credit_note_prefix": _prefix,
}
