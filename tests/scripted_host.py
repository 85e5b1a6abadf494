"""Host memory for a scripted model: copies of its KV by slot, loads that take a while, and a referee.

What is stored or placed is moved at once, which is what a device's stream amounts to, if nobody writes the same blocks
out of turn: that is looked at here. A load is done after `delay()` more looks at it, or when somebody waits.
"""

from __future__ import annotations

from array import array

UNWRITTEN = -1


class Load:
    def __init__(self, kv, delay, seconds):
        self.kv = kv
        self.seconds = seconds
        self._looks_left = delay

    @property
    def done(self):
        self._looks_left -= 1
        return self._looks_left < 0

    def wait(self):
        self._looks_left = 0


class ScriptedHost:
    """`seconds_per_block`: what a copy says it took; 0: it cannot say."""

    def __init__(self, runner, num_slots, *, delay=lambda: 0, seconds_per_block=0.0):
        self.runner = runner
        self.num_slots = num_slots
        self.bytes_per_slot = runner.block_size * 4
        self.layout = "tokens"
        self.seconds_per_block = seconds_per_block
        self.fail = None
        self.num_stored = self.num_placed = 0
        self._delay = delay
        self._kv = [array("i", [UNWRITTEN] * runner.block_size) for _ in range(num_slots)]

    def store(self, pairs):
        self._may_fail()
        assert len({slot for _, slot in pairs}) == len(pairs), "a slot is written twice"
        self._check_at_rest(block for block, _ in pairs)
        if hasattr(self.runner, "settle"):
            self.runner.settle()
        for block, slot in pairs:
            assert self.runner._kv[block][0] != UNWRITTEN, "a copy of what nobody wrote"
            self._kv[slot][:] = self.runner._kv[block]
        self.num_stored += len(pairs)
        return Load(None, 0, len(pairs) * self.seconds_per_block)

    def load(self, slots):
        self._may_fail()
        kv = [array("i", self._kv[slot]) for slot in slots]
        return Load(kv, self._delay(), len(slots) * self.seconds_per_block)

    def place(self, loaded, blocks):
        self._may_fail()
        assert loaded._looks_left <= 0, "placed before it arrived"
        blocks = list(blocks)
        if hasattr(self.runner, "_check_unused"):
            self.runner._check_unused(blocks)
        for kv, block in zip(loaded.kv, blocks, strict=True):
            self.runner._kv[block][:] = kv
        self.num_placed += len(blocks)

    def read(self, slot):
        return self._kv[slot].tobytes()

    def write(self, slot, data):
        self._kv[slot][:] = array("i", bytes(data))

    def _may_fail(self):
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure

    def _check_at_rest(self, blocks):
        """No launched step writes them."""
        tickets = getattr(self.runner, "_uncollected", ())
        written = {block for t in tickets for row in t.rows for block in self.runner._written(row)}
        assert not written & set(blocks), "a copy of what a launched step writes"
