"""Spend limits and alerts in OpenAI's shapes, in the currency that the tenant pays in. The module holds shapes only.

An amount is `threshold_amount`, a whole number of the currency's smallest unit (cents, yen) with its `currency`, or
`amount`, a decimal text such as 12.50. Answers have both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from accounting.limits.spend_alerts import AlertFields, SpendAlertInfo
from accounting.limits.spend_limits import MICRO_UNITS_PER_CENT, SpendLimitInfo, in_cents
from accounting.values.currencies import places, unit, written
from gateway.base import errors
from gateway.schema import forms
from gateway.schema.money import MICRO_UNITS

MOST_MICRO_UNITS = 9_000_000_000_000_000
Whole = Annotated[int, Meta(ge=0, le=900_000_000_000)]
Decimal = Annotated[str, Meta(pattern=forms.AMOUNT)]
Currency = Annotated[str, Meta(pattern=forms.CURRENCY)]
Email = Annotated[str, Meta(min_length=3, max_length=320, pattern=forms.EMAIL)]
Line = Annotated[str, Meta(max_length=100, pattern=forms.ONE_LINE)]
Scope = Literal["project", "organization"]


class SpendLimitFields(msgspec.Struct, frozen=True, kw_only=True):
    interval: Literal["month"]
    threshold_amount: Whole | None = None
    amount: Decimal | None = None
    currency: Currency | None = None

    def micro_units(self, own: str) -> int:
        """Returns the amount in the tenant's `own` currency. Raises `ApiError` 400."""
        if self.amount is not None and self.threshold_amount is not None:
            raise errors.invalid("Give 'threshold_amount' or 'amount', not both.", "amount")
        if self.amount is not None:
            found = _exact(self.amount, own)
        elif self.threshold_amount is None:
            raise _missing("threshold_amount")
        elif self.currency is None:
            raise _missing("currency")
        else:
            found = self.threshold_amount * unit(places(own))
        if found > MOST_MICRO_UNITS:
            raise errors.invalid(f"At most {written(MOST_MICRO_UNITS, own)} {own} fits.", "amount")
        return found


class Channel(msgspec.Struct, frozen=True):
    type: Literal["email"]
    recipients: Annotated[list[Email], Meta(min_length=1, max_length=20)]
    subject_prefix: Line | None = None


class SpendAlertFields(SpendLimitFields, frozen=True, kw_only=True):
    notification_channel: Channel

    def alert(self, own: str) -> AlertFields:
        """Returns the alert in the tenant's `own` currency. Raises `ApiError` 400 and InvalidError."""
        channel = self.notification_channel
        return AlertFields(in_cents(self.micro_units(own)), tuple(channel.recipients), channel.subject_prefix)


def spend_limit(scope: Scope, found: SpendLimitInfo) -> dict[str, Any]:
    return {
        "object": f"{scope}.spend_limit",
        **_terms(found.micro_units, found.currency),
        "enforcement": {"status": "enforcing" if found.enforcing else "inactive"},
    }


def spend_alert(scope: Scope, found: SpendAlertInfo, currency: str) -> dict[str, Any]:
    return {
        "id": found.id,
        "object": f"{scope}.spend_alert",
        **_terms(found.cents * MICRO_UNITS_PER_CENT, currency),
        "notification_channel": {
            "type": "email",
            "recipients": list(found.recipients),
            "subject_prefix": found.subject_prefix,
        },
    }


def _terms(micro_units: int, currency: str) -> dict[str, Any]:
    return {
        "threshold_amount": micro_units // unit(places(currency)),
        "amount": written(micro_units, currency),
        "currency": currency,
        "interval": "month",
    }


def _exact(amount: str, currency: str) -> int:
    whole, _, fraction = amount.partition(".")
    if len(fraction) > places(currency):
        raise errors.invalid(f"An amount in {currency} has at most {places(currency)} decimals.", "amount")
    return int(whole) * MICRO_UNITS + int(fraction.ljust(6, "0"))


def _missing(name: str) -> errors.ApiError:
    return errors.invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
