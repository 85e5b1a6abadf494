"""The output that one attempt may still commit, and how long it waits for more. The module is pure."""

from __future__ import annotations

from workers.protocol.messages import ExtendLease


class Lease:
    """The output that one attempt may still commit, over all its choices. `spent` + `in_flight` never exceed
    `bound`."""

    __slots__ = ("bound", "heard_at", "in_flight", "last", "parked_at", "seq", "spent", "stride")

    def __init__(self, bound: int, seq: int, spent: int, now: float, stride: int = 1) -> None:
        """Creates a lease. `stride` tokens can only be drawn together; with fewer left nothing can be drawn."""
        self.stride = stride
        self.bound = bound
        self.seq = seq
        self.spent = spent
        self.in_flight = 0
        self.last = False
        self.heard_at = now
        """Time when parking began or when the gateway last sent a message. The time limit of a parked attempt runs from
        here."""
        self.parked_at: float | None = None

    @property
    def left(self) -> int:
        return self.bound - self.spent - self.in_flight

    @property
    def at_bound(self) -> bool:
        """Whether nothing can be drawn, whatever is in flight."""
        return self.bound - self.spent < self.stride

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left and the gateway will send no more."""
        return self.last and self.at_bound

    def park(self, now: float) -> bool:
        """Marks the lease as parked. Returns whether this call begins the parking."""
        if self.parked_at is not None:
            return False
        self.parked_at = self.heard_at = now
        return True

    def extend(self, message: ExtendLease, now: float) -> None:
        """Applies a message if it is newer than the last one. The bound never falls."""
        if message.lease_seq <= self.seq:
            return
        self.seq = message.lease_seq
        self.bound = max(self.bound, message.bound)
        self.last = message.last
        self.heard_at = now
