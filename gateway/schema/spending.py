"""Spend limits and alerts in OpenAI's shapes: whole cents, one currency, one interval. Shapes only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from accounting.limits.spend_alerts import AlertFields, SpendAlertInfo
from accounting.limits.spend_limits import SpendLimitInfo
from gateway.schema import forms

MAX_CENTS = 900_000_000_000
Cents = Annotated[int, Meta(ge=0, le=MAX_CENTS)]
Email = Annotated[str, Meta(min_length=3, max_length=320, pattern=forms.EMAIL)]
Line = Annotated[str, Meta(max_length=100, pattern=forms.ONE_LINE)]
Scope = Literal["project", "organization"]
TERMS: dict[str, Any] = {"currency": "USD", "interval": "month"}


class SpendLimitFields(msgspec.Struct, frozen=True):
    threshold_amount: Cents
    currency: Literal["USD"]
    interval: Literal["month"]


class Channel(msgspec.Struct, frozen=True):
    type: Literal["email"]
    recipients: Annotated[list[Email], Meta(min_length=1, max_length=20)]
    subject_prefix: Line | None = None


class SpendAlertFields(msgspec.Struct, frozen=True):
    threshold_amount: Cents
    currency: Literal["USD"]
    interval: Literal["month"]
    notification_channel: Channel

    @property
    def alert(self) -> AlertFields:
        channel = self.notification_channel
        return AlertFields(self.threshold_amount, tuple(channel.recipients), channel.subject_prefix)


def spend_limit(scope: Scope, found: SpendLimitInfo) -> dict[str, Any]:
    return {
        "object": f"{scope}.spend_limit",
        "threshold_amount": found.cents,
        **TERMS,
        "enforcement": {"status": "enforcing" if found.enforcing else "inactive"},
    }


def spend_alert(scope: Scope, found: SpendAlertInfo) -> dict[str, Any]:
    return {
        "id": found.id,
        "object": f"{scope}.spend_alert",
        "threshold_amount": found.cents,
        **TERMS,
        "notification_channel": {
            "type": "email",
            "recipients": list(found.recipients),
            "subject_prefix": found.subject_prefix,
        },
    }
