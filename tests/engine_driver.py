"""Drives the real engine by hand: one thread, a clock that tests move, every law looked at on the way."""

from __future__ import annotations

from collections import defaultdict

from fakes import EOS, ScriptedRunner, expected_output, scripted_engine
from lagged_runner import LaggedRunner, watch
from scripted_host import ScriptedHost

from cache import invariants
from cache.blocks.usage import SHARED
from workers.engine.sequences.sequence import Status
from workers.protocol.messages import Failed, Finished, GenerateRequest, StepFrame
from workers.protocol.prompt_logprobs import unpack

LINK = 1


class Driver:
    """The engine, moved by hand. With `lag`, the runner becomes a device that answers one step late and looks after its
    rows and blocks."""

    lag = 0

    def __init__(self, runner=None, *, lag=None, device=None, host=None, **options):
        """`host`: options of a scripted host tier."""
        self.runner = runner or ScriptedRunner(num_blocks=64, block_size=4)
        lag = self.lag if lag is None else lag
        if lag or device is not None:
            max_running = options.get("max_running", 64)
            self.runner = LaggedRunner(self.runner, max_running, lag=lag, **(device or {}))
        self.host = self._host(host) if host else None
        self.now = 1000.0
        self.engine = scripted_engine(self.runner, clock=lambda: self.now, host=self.host, **options)
        if isinstance(self.runner, LaggedRunner):
            watch(self.cache, self.runner)
        self.inbox = []
        self.outputs = []
        self.tokens = defaultdict(list)
        self.finishes = {}
        self.spent = {}
        self.prompt_counts = {}
        self.vectors = {}
        self.prompt_logprobs = {}
        self.endings = {}
        self.requests = {}
        self.records = []
        self.eos_every = 0

    def _host(self, options):
        return ScriptedHost(self.runner, **options)

    @property
    def cache(self):
        return self.engine.cache

    @property
    def scheduler(self):
        return self.engine.scheduler

    def send(self, *messages, link=LINK):
        for message in messages:
            if isinstance(message, GenerateRequest):
                self.requests[link, message.request_id] = message
            self.inbox.append((link, message))

    def step(self, after_s=0.01):
        events, self.inbox = self.inbox, []
        self.now += after_s
        output = self.engine.step(events)
        self.outputs.append(output)
        self._hear(output)
        self._check_running()
        return output

    def settle(self):
        """No further events: the step in flight is collected, as if nothing were left to plan."""
        while self.engine.num_in_flight:
            assert self.engine._collect()
        self._hear(self.engine._emit(self.now))
        return self

    def run(self, max_steps=2000):
        """Steps until nothing is left; a step limit turns a livelock into a failure."""
        for _ in range(max_steps):
            if self.idle:
                return self
            self.step()
        raise AssertionError(f"still {len(self.engine.attempts)} attempts after {max_steps} steps")

    @property
    def idle(self):
        return not (self.inbox or self.engine.attempts or self.engine.num_in_flight)

    def attempt(self, request_id, link=LINK):
        return self.engine.attempts[link, request_id]

    def _hear(self, output):
        for link, message in output.messages:
            if isinstance(message, StepFrame):
                for delta in message.deltas:
                    self._hear_delta((link, delta.request_id), delta)
            elif isinstance(message, Finished | Failed):
                key = (link, message.request_id)
                assert key not in self.endings, "two endings of one attempt"
                self.endings[key] = message

    def _hear_delta(self, key, delta):
        assert key not in self.endings, "a delta behind the ending"
        choice = (*key, delta.index)
        assert choice not in self.finishes, "a delta of an ended choice"
        handed = dict(self.requests[key].resume).get(delta.index, ())
        assert delta.seq_no == len(handed) + len(self.tokens[choice])
        self.tokens[choice] += delta.tokens
        if delta.num_spent:
            assert delta.num_spent >= self.spent.get(key, 0)
            self.spent[key] = delta.num_spent
        if delta.prompt is not None:
            assert key not in self.prompt_counts, "prompt counts sent twice"
            self.prompt_counts[key] = delta.prompt
            self.prompt_logprobs[key] = tuple(one for part in unpack(delta.prompt_logprobs) for one in part)
        if delta.vector:
            self.vectors[choice] = delta.vector
        if delta.finish is not None:
            self.finishes[choice] = delta.finish
        self.records.append(delta)

    def _check_running(self):
        """Checks after every step: the cache's laws, no row of a sequence without all its blocks, no lease passed,
        nothing given back that a step in flight uses."""
        scheduler = self.engine.scheduler
        running = [s for sequences in scheduler.running.values() for s in sequences]
        leaving = scheduler.block_tables._leaving
        invariants.check(self.cache, [s.handle for s in running + leaving])
        for sequence in running:
            assert len(sequence.block_ids) * self.cache.block_size >= scheduler.layout.place(sequence)
            assert sequence.num_computed <= sequence.num_scheduled
            assert sequence.num_computed <= len(sequence.tokens), "tokens nobody has seen"
        assert self.engine.num_in_flight <= self.runner.lag
        if leaving:
            assert self.engine.num_in_flight
        rows = [sequence.row_id for sequence in running + leaving]
        assert len(set(rows)) == len(rows)
        if isinstance(self.runner, LaggedRunner):
            assert self.runner.row_ids_in_flight <= set(rows)
        for attempt in self.engine.attempts.values():
            lease = attempt.lease
            assert lease.in_flight == sum(s.num_pending for s in attempt.sequences)
            assert lease.spent <= max(lease.bound, attempt.message.num_output_spent)
            tables = [s.block_ids for s in attempt.sequences]
            assert attempt.held.number == len({b for table in tables for b in table})
            for sequence in attempt.sequences:
                if self.engine.num_in_flight == 0:
                    assert sequence.num_pending == 0
                    assert sequence.num_scheduled == sequence.num_computed
                held = sequence.status is Status.RUNNING or sequence in leaving
                assert (sequence.handle is not None) == held
                assert (sequence.row_id >= 0) == held

    def check_idle(self):
        """Nothing is held beyond the cache, and the books agree with the steps."""
        assert self.idle
        if self.host is not None:
            assert self.scheduler.restores.num_open == 0
            assert not self.cache.owners.moving
            assert not self.cache.host._swapped, "a swap leaked"
            assert not any(copy.num_pins for copy in self.cache.host.copies()), "a pin leaked"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.num_waiting_tokens == 0
        assert not self.engine._attempts._beams._searches, "a search leaked"
        assert not getattr(self.scheduler.layout, "_held", None), "the state of a table leaked"
        assert not getattr(self.scheduler.speculation, "_draftings", None), "the state of a draft leaked"
        invariants.check(self.cache, [])
        pinned = self.cache.num_pinned
        assert self.cache.available(SHARED) + pinned == self.cache.num_blocks - 1, "a block leaked"
        self.check_books()
        return self

    def check_books(self):
        totals = self.engine.totals
        if isinstance(self.runner, LaggedRunner):
            num_tokens = totals.num_prefill_tokens + totals.num_lag_discarded
            num_tokens += totals.num_proposed + self.engine.failures.pulse.num_steps
            num_tokens += sum(r.num_decode_seqs for o in self.outputs for r in o.steps)
            assert num_tokens == self.runner.num_tokens, "work of the device that no record has"
        usages = [ending.usage for ending in self.endings.values()]
        usages += [a.usage for o in self.outputs for a in o.ended if a.end_reason == "link_lost"]
        computed = sum(u.uncached + u.cache_write + u.recomputed for u in usages)
        assert computed == self.engine.totals.num_prefill_tokens
        assert sum(u.output for u in usages) == self.engine.totals.num_output_tokens
        num_rejected = totals.num_proposed - totals.num_accepted
        assert sum(u.speculated for u in usages) == num_rejected
        assert sum(u.recomputed for u in usages) == self.engine.totals.num_recomputed
        for key, ending in self.endings.items():
            message = self.requests[key]
            heard = sum(len(t) for (link, rid, _), t in self.tokens.items() if (link, rid) == key)
            assert ending.usage.output == (heard if message.beams is None else self.spent.get(key, 0))
            if key in self.prompt_counts:
                assert ending.usage.prompt == len(message.prompt)
                counts = self.prompt_counts[key]
                assert counts.cache_read == ending.usage.cache_read
                assert counts.cache_write == ending.usage.cache_write

    def check_alone(self, request, link=LINK, index=0, exactly=True):
        """The tokens of a choice are those of the request run by itself, as far as the pool can hold."""
        from workers.engine.values.sampling_params import choice_seed

        room = self.engine.scheduler.limits.max_len - len(request.prompt)
        alone = expected_output(
            request.prompt,
            request.sampling,
            min(request.max_tokens, room),
            seed=choice_seed(request.sampling.seed, index),
            eos_every=self.eos_every,
        )
        handed = list(dict(request.resume).get(index, ()))
        together = handed + self.tokens[link, request.request_id, index]
        assert together == (alone if exactly else alone[: len(together)])


__all__ = ["EOS", "LINK", "Driver"]
