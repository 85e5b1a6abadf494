"""The body and the objects of `/admin/v1/webhooks` and `/v1/webhooks`. The module holds shapes only."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from accounting.events.webhooks import DeliveryInfo, NewWebhook, WebhookInfo
from accounting.values.types import OPERATOR_TENANT
from gateway.schema.convert import OwnBody


class WebhookFields(OwnBody, frozen=True):
    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    events: Annotated[list[str], Meta(max_length=100)] | None = None
    """A value of None means every event."""
    project_id: str | None = None
    """A value of None means the events of all projects, and for a tenant's key those of its own."""


def webhook(info: WebhookInfo) -> dict[str, Any]:
    counts = info.counts
    return {
        "id": info.id,
        "object": "webhook",
        "project_id": None if info.tenant_id == OPERATOR_TENANT else info.tenant_id,
        "url": info.url,
        "events": None if info.events is None else list(info.events),
        "created_at": info.created_at,
        "full": info.is_full,
        "deliveries": {"pending": counts.pending, "delivered": counts.delivered, "dead": counts.dead},
        "last_error": counts.last_error,
    }


def new_webhook(made: NewWebhook) -> dict[str, Any]:
    """Returns a new webhook. This is the only shape with the secret in it."""
    return webhook(made.info) | {"secret": made.secret}


def delivery(one: DeliveryInfo) -> dict[str, Any]:
    return {
        "id": one.event_id,
        "object": "webhook.delivery",
        "type": one.type,
        "state": one.state,
        "attempts": one.attempts,
        "last_error": one.last_error,
        "created_at": one.created_at_ms // 1000,
        "next_try_at": one.deliver_after_ms // 1000 if one.state == "pending" else None,
    }
