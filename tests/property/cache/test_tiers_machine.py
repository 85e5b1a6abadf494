"""The host tier against naive models, at sizes where everything collides.

First alone: which copies it keeps, of whom, is predicted by looking at every one each time. Then behind the pool and the
tree: shadow KV (the regions and tokens of the whole prefix) goes with each block to its slot and back, and whatever is
found, stored or restored must carry the shadow of the prefix that it stands for.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from cache_machine import (
    ANNA,
    BERT,
    PATHS,
    PUBLIC,
    SIZE,
    CacheMachine,
    Prefix,
    Sequence,
    at_length,
    names,
    pick,
    prompts,
    tenants,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.host.tiers import HostBlock, HostTier
from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import segments


def prefix_of(copy: HostBlock) -> Prefix:
    found: Prefix = ()
    while copy.parent is not None:
        tokens = array("i")
        tokens.frombytes(copy.key[1])
        found = (*((copy.key[0], token) for token in tokens), *found)
        copy = copy.parent
    return found


class HostMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 8))
    def start(self, num_slots: int) -> None:
        self.host = HostTier(num_slots, SIZE)
        self.clock = 0
        self.kept: dict[Prefix, tuple[str, int]] = {}
        """Tenant, and when it was used last."""
        self.seen: dict[str, int] = {}
        """Slots of a tenant's preempted sequences, by first mention."""
        self.quotas: dict[str, int] = {}
        self.swaps: list[tuple[str, list[int]]] = []
        self.pinned: list[list[HostBlock]] = []
        self.stuck = 0

    # What the model believes.

    def pinned_prefixes(self) -> set[Prefix]:
        return {prefix_of(copy) for copies in self.pinned for copy in copies if not copy.gone}

    def num_of(self, tenant: str) -> int:
        return sum(t == tenant for t, _ in self.kept.values()) + self.seen.get(tenant, 0)

    def num_free(self) -> int:
        gone = {c.slot for copies in self.pinned for c in copies if c.gone}
        return self.host.num_slots - len(self.kept) - sum(self.seen.values()) - len(gone)

    def reuse(self, tenant: str, end: Prefix) -> bool:
        parents = {prefix[:-SIZE] for prefix in self.kept}
        pinned = self.pinned_prefixes() | {end}
        mine = [
            (used, -len(prefix), prefix)
            for prefix, (owner, used) in self.kept.items()
            if owner == tenant and prefix not in parents and prefix not in pinned
        ]
        if mine:
            del self.kept[min(mine)[2]]
        return bool(mine)

    def slot(self, tenant: str, end: Prefix = ()) -> bool:
        self.seen.setdefault(tenant, 0)
        if self.num_of(tenant) >= self.quotas.get(tenant, 99):
            return self.reuse(tenant, end)
        if self.num_free():
            return True
        largest = max(sorted(self.seen), key=self.num_of)
        if self.num_of(largest) > self.num_of(tenant) + 1 and self.reuse(largest, end):
            return True
        return self.reuse(tenant, end)

    # What a cache does.

    @rule(name=names, tokens=prompts)
    def write(self, name: str, tokens: list[int]) -> None:
        tenant = name.split()[0]
        nodes, depth = [], 0
        for segment in segments(PATHS[name], SIZE):
            end = min(segment.end, len(tokens) // SIZE)
            owner = "operator" if segment.region == PUBLIC else tenant
            nodes.append(
                SimpleNamespace(
                    region=segment.region,
                    tenant=owner,
                    block_ids=range(depth, end),
                    tokens=tokens[depth * SIZE : end * SIZE],
                )
            )
            depth = max(depth, end)
        written = self.host.write(nodes)
        assert [prefix_of(one.copy) for one in written] == self.expect_write(nodes)

    def expect_write(self, nodes: list[SimpleNamespace]) -> list[Prefix]:
        prefix: Prefix = ()
        new: list[Prefix] = []
        path: list[Prefix] = []
        for node in nodes:
            for i in range(len(node.block_ids)):
                block = node.tokens[i * SIZE : (i + 1) * SIZE]
                longer = prefix + tuple((node.region, token) for token in block)
                if longer not in self.kept:
                    if not self.slot(node.tenant, prefix):
                        return self.used(path, new)
                    self.kept[longer] = node.tenant, 0
                    new.append(longer)
                prefix = longer
                path.append(prefix)
        return self.used(path, new)

    def used(self, path: list[Prefix], new: list[Prefix]) -> list[Prefix]:
        self.clock += 1
        for prefix in path:
            self.kept[prefix] = self.kept[prefix][0], self.clock
        return new

    @rule(name=names, tokens=prompts, start=st.integers(0, 3), use=st.booleans(), pin=st.booleans())
    def read(self, name: str, tokens: list[int], start: int, use: bool, pin: bool) -> None:
        path = segments(PATHS[name], SIZE)
        limit = len(tokens) // SIZE
        copies = self.host.match(path, tokens, start, limit)
        sequence = Sequence(PATHS[name], tokens, None, [], 0, 0)
        depth = 0
        while depth < limit and sequence.prefix((depth + 1) * SIZE) in self.kept:
            depth += 1
        expected = [sequence.prefix((i + 1) * SIZE) for i in range(start, depth)]
        assert [prefix_of(copy) for copy in copies] == expected
        if use and copies:
            self.host.hit(copies)
            self.used([sequence.prefix((i + 1) * SIZE) for i in range(depth)], [])
        if pin and copies:
            self.host.pin(copies)
            self.pinned.append(copies)

    @precondition(lambda self: self.pinned)
    @rule(index=pick)
    def unpin(self, index: int) -> None:
        self.host.unpin(self.pinned.pop(index % len(self.pinned)))

    @rule(tenant=tenants, number=st.integers(1, 3))
    def swap_out(self, tenant: str, number: int) -> None:
        slots = self.host.reserve(tenant, number)
        got = 0
        while got < number and self.slot(tenant):
            self.seen[tenant] += 1
            got += 1
        assert (slots is not None) == (got == number)
        if slots is None:
            self.seen[tenant] -= got
        else:
            self.swaps.append((tenant, slots))

    @precondition(lambda self: self.swaps)
    @rule(index=pick)
    def swap_in(self, index: int) -> None:
        tenant, slots = self.swaps.pop(index % len(self.swaps))
        self.host.give_back(slots)
        self.seen[tenant] -= len(slots)

    @rule(tenant=tenants, quota=st.sampled_from([None, 0, 1, 3]))
    def quota(self, tenant: str, quota: int | None) -> None:
        self.host.set_quota(tenant, quota)
        if quota is not None or tenant in self.seen:
            self.seen.setdefault(tenant, 0)
            self.quotas[tenant] = 99 if quota is None else quota

    @rule(tenant=st.sampled_from(["anna", "bert"]))
    def purge(self, tenant: str) -> None:
        self.host.purge(tenant)
        self.kept = {p: one for p, one in self.kept.items() if one[0] != tenant}

    @rule(region=st.sampled_from([PUBLIC, ANNA, BERT]))
    def drop(self, region: bytes) -> None:
        self.host.drop(region)
        self.kept = {p: one for p, one in self.kept.items() if all(r != region for r, _ in p)}

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "host"):
            return
        assert list(self.host.broken()) == []
        assert {prefix_of(copy): copy.tenant for copy in self.host.copies()} == {
            prefix: tenant for prefix, (tenant, _) in self.kept.items()
        }
        assert self.host.num_free == self.num_free()


class TieredMachine(CacheMachine):
    """The pool and the tree with a host behind them."""

    @initialize(num_blocks=st.integers(9, 16), pin_limit=st.sampled_from([0, 3, 16]), num_slots=st.integers(1, 20))
    def start(self, num_blocks: int, pin_limit: int, num_slots: int) -> None:
        super().start(num_blocks, pin_limit)
        self.slots: dict[int, Prefix] = {}
        self.cache = PrefixCache(
            num_blocks, SIZE, pin_limit=pin_limit, now_ms=lambda: self.now, host=HostTier(num_slots, SIZE)
        )

    def flush(self) -> None:
        for block, copy in self.cache.owners.offers.take():
            assert self.shadow[block, SIZE - 1] == prefix_of(copy), "a copy of something else"
            self.slots[copy.slot] = self.shadow[block, SIZE - 1]

    def allocate(self, n: int, *reach: object) -> list[int] | None:
        blocks = super().allocate(n, *reach)
        self.flush()
        return blocks

    def write(self, sequence: Sequence, upto: int) -> None:
        self.flush()
        super().write(sequence, upto)

    @precondition(lambda self: self.sequences)
    @rule(index=pick)
    def hit(self, index: int) -> None:
        self.cache.hit(self.some(index).handle)

    @rule(name=names, tokens=prompts, purged=st.sampled_from(["", "", "anna", "bert"]))
    def restore(self, name: str, tokens: list[int], purged: str) -> None:
        """A request that the host may help; a purge may come while its blocks are on the way."""
        tenant, path, cache = name.split()[0], PATHS[name], self.cache
        self.flush()
        handle = cache.acquire(path, tokens, tenant=tenant)
        sequence = Sequence(path, tokens, handle, list(handle.block_ids), len(tokens), handle.num_tokens)
        self.sequences.append(sequence)
        copies = cache.copies(handle, tokens)
        for place, copy in enumerate(copies, handle.num_tree_blocks):
            assert prefix_of(copy) == sequence.prefix((place + 1) * SIZE), "another prefix"
        cache.host.pin(copies)
        blocks = self.allocate(-(-len(tokens) // SIZE) - len(sequence.table))
        if blocks is None:
            cache.host.unpin(copies)
            self.finish(len(self.sequences) - 1)
            return
        sequence.table += blocks
        moving = blocks[: len(copies)]
        cache.begin_move(moving)
        for block in moving:
            for change in (cache.free, cache.share):
                with pytest.raises(RuntimeError, match="moving"):
                    change([block])
        if purged:
            self.purge(purged)
        self.laws()
        cache.end_move(moving)
        for block, copy in zip(moving, copies, strict=True):
            whole = self.slots[copy.slot]
            for slot in range(SIZE):
                self.shadow[block, slot] = whole[: len(whole) - SIZE + slot + 1]
        sequence.num_computed += len(copies) * SIZE
        cache.host.hit(copies)
        cache.host.unpin(copies)

    @invariant()
    def every_slot_holds_the_prefix_of_its_copy(self) -> None:
        self.flush()
        for copy in self.cache.host.copies():
            assert self.slots[copy.slot] == prefix_of(copy)

    @invariant()
    def what_is_purged_is_in_no_tier(self) -> None:
        found = {copy.tenant for copy in self.cache.host.copies()}
        assert found <= {"anna", "bert", "operator"}


HostMachine.TestCase.settings = CacheMachine.TestCase.settings
TieredMachine.TestCase.settings = CacheMachine.TestCase.settings
TestTheHostAgainstANaiveModel = HostMachine.TestCase
TestTheHostAgainstANaiveModelAtLength = at_length(HostMachine)
TestTheTreeWithAHostBehindIt = TieredMachine.TestCase
TestTheTreeWithAHostBehindItAtLength = at_length(TieredMachine)
