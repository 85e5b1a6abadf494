"""The payloads of the gateway's journal: msgpack of the kinds in `workers/protocol/journal.py`. Pure.

No prompt, no output, no secret ever enters a payload.
"""

from __future__ import annotations

import msgspec

from accounting.values.types import Outcome, Posting, Tier, WriteOffReason


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """OPEN: a request was admitted. This record alone is enough for a successor of this process to end the request."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    root: str
    tier: Tier
    price_version: str
    currency: str
    opened_at_ms: int
    prompt_tokens: int
    reserved: int
    attempt: int = 0
    trace_id: str = ""
    batch_id: str | None = None
    line_no: int | None = None
    end_user: str = ""

    def void(
        self, outcome: Outcome, write_off: WriteOffReason, ended_at_ms: int, reserved: int | None = None
    ) -> Posting:
        """Returns the ending that charges nothing."""
        return Posting(
            kind="void",
            request_id=self.request_id,
            outcome=outcome,
            tenant_id=self.tenant_id,
            key_id=self.key_id,
            model=self.model,
            root=self.root,
            tier=self.tier,
            price_version=self.price_version,
            currency=self.currency,
            opened_at_ms=self.opened_at_ms,
            ended_at_ms=ended_at_ms,
            write_off=write_off,
            reserved=self.reserved if reserved is None else reserved,
            trace_id=self.trace_id,
            batch_id=self.batch_id,
            line_no=self.line_no,
            end_user=self.end_user,
        )


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """PROGRESS: output tokens received, and the bound granted."""

    request_id: str
    num_received: int
    bound: int


class Attempted(msgspec.Struct, frozen=True, array_like=True):
    """ATTEMPT: the request goes on at another worker."""

    request_id: str
    attempt: int
    num_handed_over: int


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """SEAL: it follows the OPENs that a segment takes over from the one before, and it is the last
    record of a segment.
    """

    last_seq: int
    num_open: int


def encode(payload: Opened | Progress | Attempted | Sealed | Posting) -> bytes:
    return msgspec.msgpack.encode(payload)


def opened(payload: bytes) -> Opened:
    """Decodes an OPEN. Raises `msgspec.DecodeError`, like the functions below."""
    return msgspec.msgpack.decode(payload, type=Opened)


def posting(payload: bytes) -> Posting:
    return msgspec.msgpack.decode(payload, type=Posting)


def sealed(payload: bytes) -> Sealed:
    return msgspec.msgpack.decode(payload, type=Sealed)
