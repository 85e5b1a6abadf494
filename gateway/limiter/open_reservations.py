"""This gateway's share of the limiter's state: open reservations, and endings that Redis has not confirmed. Memory
only.

If Redis lost a tenant's state, it is rebuilt from this. Nothing here awaits, so a list shows a single moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from accounting.limits.limiter_state import Running
from accounting.values.types import Tier
from gateway.limiter.rules import LimitSubject

Ending = Literal["settle", "release"]


@dataclass
class OpenReservation:
    """The fields of an open request that Redis knows."""

    holder: LimitSubject
    prompt_tokens: int
    bound: int
    seq: int
    reserved: int


class PendingEnding(msgspec.Struct, frozen=True):
    ending: Ending
    holder: LimitSubject
    args: dict[str, Any]


class Detail(msgspec.Struct, frozen=True, array_like=True):
    """An open request as one gateway reports it to the gateway that rebuilds."""

    key_id: str
    model: str
    tier: Tier
    places: tuple[str, ...]
    windows: tuple[str, ...]
    prompt_tokens: int
    bound: int
    seq: int
    reserved: int


@dataclass
class OpenReservations:
    slot: int
    held: dict[str, OpenReservation] = field(default_factory=dict)
    owed: dict[str, PendingEnding] = field(default_factory=dict)

    @property
    def tenants(self) -> set[str]:
        return {held.holder.tenant_id for held in self.held.values()}

    def listed(self) -> list[Running]:
        return [
            Running(request_id, self.slot, held.holder.tenant_id, held.holder.opened_ms, _detail(held))
            for request_id, held in self.held.items()
        ]


def detail_of(running: Running) -> Detail:
    return msgspec.msgpack.decode(running.detail, type=Detail)


def _detail(held: OpenReservation) -> bytes:
    holder = held.holder
    return msgspec.msgpack.encode(
        Detail(
            holder.key_id,
            holder.model,
            holder.tier,
            holder.places,
            holder.windows,
            held.prompt_tokens,
            held.bound,
            held.seq,
            held.reserved,
        )
    )
