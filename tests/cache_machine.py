"""The cache against a naive model, at sizes where everything collides: block size 2, a pool of 13, two token ids.

The model knows no tree. It keeps, per block, what was written into each slot (shadow KV: the regions and tokens of the
whole prefix), and the set of prefixes that a request may find. Wrong sharing of any kind, a block handed out twice or an
eviction under a running sequence shows as a slot that holds another prefix than the table's owner wrote. Who is evicted
is predicted block by block, by looking at every node each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import invariants
from cache.blocks.eviction import INTERACTIVE, RECENT_MS
from cache.blocks.ownership import IDLE_MS
from cache.blocks.usage import COLD, LAST_RESORT, SHARED, Reach
from cache.prefix_cache import PrefixCache
from cache.tree.handle import Handle
from cache.tree.namespaces import NamespacePath, PathEntry
from cache.tree.radix import Node

SIZE = 2
PUBLIC, ANNA, BERT = b"public", b"anna", b"bert"
PATHS: dict[str, NamespacePath] = {
    "operator": (PathEntry(PUBLIC, -1),),
    "anna": (PathEntry(ANNA, -1),),
    "bert": (PathEntry(BERT, -1),),
    "anna behind public": (PathEntry(PUBLIC, 4), PathEntry(ANNA, -1)),
    "bert behind public": (PathEntry(PUBLIC, 4), PathEntry(BERT, -1)),
    "anna behind a rounded end": (PathEntry(PUBLIC, 3), PathEntry(ANNA, -1)),
}


def prompt(length: int, flipped: int) -> list[int]:
    return [int(position == flipped) for position in range(length)]


# Prompts that differ in one token at most: long shared prefixes, so that splits and duplicates are the rule.
prompts = st.builds(prompt, st.integers(1, 11), st.sampled_from([99, 99, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
names = st.sampled_from(sorted(PATHS))
tenants = st.sampled_from(["anna", "bert", "operator"])
reaches = st.sampled_from([SHARED, SHARED, LAST_RESORT, COLD])
pick = st.integers(0, 7)

Prefix = tuple[tuple[bytes, int], ...]


@dataclass(eq=False)
class Sequence:
    path: NamespacePath
    tokens: list[int]
    handle: Handle
    table: list[int]
    num_prompt: int
    num_computed: int
    cut_off: bool = False
    num_committed: int = 0

    def region(self, position: int) -> bytes:
        block = position // SIZE
        return next(e.region for e in self.path if e.end == -1 or block < e.end // SIZE)

    def prefix(self, end: int) -> Prefix:
        return tuple((self.region(i), self.tokens[i]) for i in range(end))


class CacheMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(9, 16), pin_limit=st.sampled_from([0, 3, 16, 100]))
    def start(self, num_blocks: int, pin_limit: int) -> None:
        self.now = 0
        self.cache = PrefixCache(num_blocks, SIZE, pin_limit=pin_limit, now_ms=lambda: self.now)
        self.floors: dict[str, int] = {}
        self.quotas: dict[str, int] = {}
        self.promised: list[tuple[set[Prefix], int]] = []
        self.sequences: list[Sequence] = []
        self.loose: list[int] = []
        self.shadow: dict[tuple[int, int], Prefix] = {}
        self.known: set[Prefix] = set()
        self.cut_off_ids: set[int] = set()

    # What the model believes.

    def in_the_tree(self) -> dict[Prefix, int]:
        """Every prefix that can be found, with the id of its last block, read off the real tree."""
        return {prefix: block for prefix, (block, _) in self.blocks().items()}

    def blocks(self) -> dict[Prefix, tuple[int, Node]]:
        """The same with its node."""
        found: dict[Prefix, tuple[int, Node]] = {}
        stack: list[tuple[Node, Prefix]] = [(self.cache.owners.tree.root, ())]
        while stack:
            node, prefix = stack.pop()
            for i, block in enumerate(node.block_ids):
                prefix += tuple((node.region, t) for t in node.tokens[i * SIZE : (i + 1) * SIZE])
                found[prefix] = block, node
            stack += [(child, prefix) for child in node.children.values()]
        return found

    def num_of(self, tenant: str) -> int:
        """Blocks that the tenant has in the tree, or had when it was dropped under somebody."""
        nodes = [*self.cache.owners.tree.nodes(), *self.cache.owners.protection.doomed]
        return sum(len(node.block_ids) for node in nodes if node.tenant == tenant)

    def may_go(self, node: Node, reach: Reach) -> bool:
        one = self.cache.owners.protection.of(node)
        recent = one.priority >= INTERACTIVE and self.now - one.used_ms < RECENT_MS
        return not one.num_protectors and (reach.recent or not recent)

    def age(self, node: Node) -> tuple[int, int, int]:
        """Returns what decides among equals: worth, last use, id."""
        one = self.cache.owners.protection.of(node)
        return one.priority, one.last_used, node.id

    def victims(self, num_blocks: int, reach: Reach) -> set[Prefix] | None:
        """Returns what an eviction of so many blocks must take; None if there are fewer within that reach."""
        left, gone = self.blocks(), set()
        has = {tenant: self.num_of(tenant) for tenant in ("anna", "bert", "operator")}
        if num_blocks > self.num_within(reach, left, has):
            return None
        for _ in range(num_blocks):
            ends = {prefix[:-SIZE] for prefix in left}
            order = [
                (self.rank(node.tenant, has[node.tenant]), *self.age(node), prefix)
                for prefix, (_, node) in left.items()
                if prefix not in ends and self.may_go(node, reach)
            ]
            if min(order)[0] == 2 and not reach.floors:
                order = [one for one in order if self.hangs(one[-1], left, has, reach)]
                assert order, "a floor gave way"
            victim = min(order)[-1]
            has[left.pop(victim)[1].tenant] -= 1
            gone.add(victim)
        return gone

    def hangs(self, victim: Prefix, left: dict[Prefix, tuple[int, Node]], has: dict[str, int], reach: Reach) -> bool:
        """Says whether the victim hangs on blocks that are within reach, which only a public prompt's can be."""
        before = [left[victim[:end]][1] for end in range(SIZE, len(victim), SIZE)]
        lost = [n for n in before if self.may_go(n, reach) and self.rank(n.tenant, has[n.tenant]) < 2]
        assert all(node.region == PUBLIC for node in lost)
        return bool(lost)

    def num_within(self, reach: Reach, left: dict[Prefix, tuple[int, Node]], has: dict[str, int]) -> int:
        within = 0
        for tenant, num_blocks in has.items():
            mine = sum(n.tenant == tenant and self.may_go(n, reach) for _, n in left.values())
            above = max(0, num_blocks - self.floors.get(tenant, 0))
            within += mine if reach.floors else min(mine, above)
        return within

    def rank(self, tenant: str, num_blocks: int) -> int:
        if num_blocks > self.quotas.get(tenant, 99):
            return 0
        return 1 if num_blocks > self.floors.get(tenant, 0) else 2

    def longest(self, sequence: Sequence) -> int:
        end = 0
        while end + SIZE <= len(sequence.tokens) - 1 and sequence.prefix(end + SIZE) in self.known:
            end += SIZE
        return end

    def write(self, sequence: Sequence, upto: int) -> None:
        for position in range(sequence.num_computed, upto):
            block = sequence.table[position // SIZE]
            assert self.cache.refcount(block) == 1, "a shared block was about to be written"
            assert not self.cache.owners.in_tree[block], "a tree block was about to be written"
            self.shadow[block, position % SIZE] = sequence.prefix(position + 1)
        sequence.num_computed = upto

    def allocate(self, n: int, reach: Reach = SHARED) -> list[int] | None:
        available, before = self.cache.available(reach), self.in_the_tree()
        expected = self.victims(max(0, n - self.cache.num_free), reach)
        held = {b for s in self.sequences for b in s.table[: s.handle.num_tree_blocks]}
        blocks = self.cache.allocate(n, reach=reach)
        assert (blocks is None) == (n > available) == (expected is None)
        after = self.in_the_tree()
        gone = before.keys() - after.keys()
        assert gone == (expected or set())
        assert not held & {before[prefix] for prefix in gone}
        assert all(prefix[:-SIZE] in after for prefix in after if len(prefix) > SIZE)
        self.known -= gone
        return blocks

    def some(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    # What an engine does.

    @rule(
        name=names,
        tokens=prompts,
        read=st.sampled_from([True, True, False]),
        priority=st.sampled_from([0, 50]),
        chunk=st.integers(0, 11),
    )
    def admit(self, name: str, tokens: list[int], read: bool, priority: int, chunk: int) -> None:
        path, before = PATHS[name], self.in_the_tree()
        matched = self.cache.match(path, tokens)
        assert self.in_the_tree() == before, "match changed the tree"
        tenant = name.split()[0]
        handle = self.cache.acquire(path, tokens, read=read, tenant=tenant, priority=priority)
        sequence = Sequence(path, tokens, handle, list(handle.block_ids), len(tokens), handle.num_tokens)
        assert matched == self.longest(sequence)
        assert handle.num_tokens == (matched if read else 0)
        self.reason_is_right(sequence, read)
        reach = SHARED if priority else COLD
        blocks = self.allocate(-(-len(tokens) // SIZE) - len(sequence.table), reach)
        if blocks is None:
            self.cache.release(handle, sequence.table)
            return
        sequence.table += blocks
        self.sequences.append(sequence)
        self.prefill(len(self.sequences) - 1, 11 - chunk)

    @rule(name=names, tokens=prompts, output=prompts, chunk=st.integers(0, 11), forks=st.integers(0, 2))
    def serve(self, name: str, tokens: list[int], output: list[int], chunk: int, forks: int) -> None:
        """A request from admission to its end: two chunks of prefill, then parallel choices that commit in turn."""
        before = len(self.sequences)
        self.admit(name, tokens, True, 0, chunk)
        if len(self.sequences) == before:
            return
        self.commit(before, 0, True, 50, False)
        self.prefill(before, len(tokens))
        if chunk % 2:
            self.commit(before, 0, True, 50, False)
        for _ in range(forks):
            self.fork(before)
        for n, token in enumerate(output[:7]):
            for index in range(before, len(self.sequences)):
                self.decode(index, token)
                if n % 2:
                    self.commit(index, 0, True, 50, False)
        while len(self.sequences) > before:
            self.finish(before)

    def reason_is_right(self, sequence: Sequence, read: bool) -> None:
        handle, missed = sequence.handle, len(sequence.tokens) - sequence.handle.num_tokens
        reason = handle.miss_reason
        assert (reason == "opt_out") == (not read)
        if read:
            assert (reason in ("last_token", "below_block")) == (missed <= SIZE)
            assert reason != "cold" or handle.num_tokens == 0
            assert reason != "diverged" or handle.num_tokens <= handle.diverged_at_token < handle.num_tokens + SIZE
            assert (reason in ("evicted", "pin_expired")) == (handle.evicted_age >= 0)
        public_end = sequence.path[0].end // SIZE * SIZE if len(sequence.path) > 1 else 0
        assert handle.public_tokens == min(handle.num_tokens, public_end)

    @precondition(lambda self: self.sequences)
    @rule(index=pick, chunk=st.integers(1, 11))
    def prefill(self, index: int, chunk: int) -> None:
        sequence = self.some(index)
        self.write(sequence, max(sequence.num_computed, min(sequence.num_computed + chunk, sequence.num_prompt)))

    @precondition(lambda self: self.sequences)
    @rule(index=pick, token=st.integers(0, 1))
    def decode(self, index: int, token: int) -> None:
        sequence = self.some(index)
        if sequence.num_computed < len(sequence.tokens) or len(sequence.tokens) > 20:
            return
        shared = len(sequence.tokens) % SIZE and self.cache.refcount(sequence.table[-1]) > 1
        if len(sequence.tokens) % SIZE == 0 or shared:
            new = self.allocate(1)
            if new is None:
                return
            if shared:
                old = sequence.table.pop()
                for slot in range(SIZE):
                    if (old, slot) in self.shadow:
                        self.shadow[new[0], slot] = self.shadow[old, slot]
                self.cache.free([old])
            sequence.table += new
        sequence.tokens.append(token)
        self.write(sequence, len(sequence.tokens))

    @precondition(lambda self: self.sequences)
    @rule(
        index=pick,
        back=st.sampled_from([0, 0, 0, 1, 2, 3]),
        write=st.sampled_from([True, True, True, False]),
        priority=st.sampled_from([20, 50]),
        deferred=st.booleans(),
    )
    def commit(self, index: int, back: int, write: bool, priority: int, deferred: bool) -> None:
        sequence = self.some(index)
        committed = max(0, sequence.num_computed - back)
        old = list(sequence.table)
        expected = self.expect_commit(sequence, committed // SIZE, write, priority)
        result = self.cache.commit(
            sequence.handle,
            sequence.tokens,
            sequence.table,
            committed,
            priority=priority,
            prompt_len=sequence.num_prompt,
            write=write,
            deferred=deferred,
        )
        sequence.table = list(result.block_ids)
        assert result.num_tree_blocks == sequence.handle.num_tree_blocks == expected
        sequence.num_committed = max(sequence.num_committed, committed)
        assert result.num_tree_blocks * SIZE <= max(sequence.num_committed, sequence.handle.num_tokens), "law 6"
        assert set(result.freed_duplicates) == set(old) - set(sequence.table)
        if deferred:
            self.cache.free(result.freed_duplicates)

    def expect_commit(self, sequence: Sequence, target: int, write: bool, priority: int) -> int:
        end = sequence.handle.num_tree_blocks
        if not write or sequence.cut_off:
            return end
        while end < target and sequence.prefix((end + 1) * SIZE) in self.known:
            end += 1
        start = end
        while (
            end < target
            and sequence.region(end * SIZE) == sequence.path[-1].region
            and sequence.table[end] not in self.cut_off_ids
        ):
            end += 1
        end = start + self.within_quota(sequence, start, end - start, priority)
        self.known |= {sequence.prefix(i * SIZE) for i in range(start + 1, end + 1)}
        return end

    def within_quota(self, sequence: Sequence, start: int, wanted: int, priority: int) -> int:
        """The tenant's own coldest blocks go for what it inserts; nobody else's do."""
        tenant = sequence.handle.tenant
        room = self.quotas.get(tenant, 99) - self.num_of(tenant)
        if not wanted or wanted <= room:
            return wanted
        reach = SHARED if priority >= INTERACTIVE else COLD
        adopted = {sequence.prefix(i * SIZE) for i in range(start + 1)}
        left = {prefix: node for prefix, (_, node) in self.blocks().items()}
        num_gone = 0
        while num_gone < wanted - room:
            ends = {prefix[:-SIZE] for prefix in left}
            mine = [
                (*self.age(node), prefix)
                for prefix, node in left.items()
                if prefix not in ends | adopted and node.tenant == tenant and self.may_go(node, reach)
            ]
            if not mine:
                break
            victim = min(mine)[3]
            del left[victim]
            self.known.remove(victim)
            num_gone += 1
        return max(0, min(wanted, room + num_gone))

    @precondition(lambda self: self.sequences)
    @rule(index=pick)
    def fork(self, index: int) -> None:
        old = self.some(index)
        handle = self.cache.fork(old.handle)
        table = list(old.table)
        self.cache.share(table[handle.num_tree_blocks :])
        # A half-written prompt is never forked: the choices would both write the shared rest.
        new = Sequence(
            old.path, list(old.tokens), handle, table, old.num_prompt, old.num_computed, old.cut_off, old.num_committed
        )
        self.sequences.append(new)
        if new.num_computed < len(new.tokens):
            self.finish(len(self.sequences) - 1)

    @precondition(lambda self: self.sequences)
    @rule(index=pick)
    def finish(self, index: int) -> None:
        sequence = self.sequences.pop(index % len(self.sequences))
        self.cache.release(sequence.handle, sequence.table)
        for again in (self.cache.release, self.cache.pin, self.cache.fork):
            with pytest.raises(RuntimeError):
                again(sequence.handle, *([sequence.table] if again == self.cache.release else []))

    @rule(n=st.integers(0, 9), reach=reaches)
    def allocate_loose(self, n: int, reach: Reach = SHARED) -> None:
        """Blocks that come and go beside the tree: 0 gives them back."""
        if n == 0:
            self.cache.free(self.loose)
            self.loose = []
        elif len(self.loose) < 6:
            self.loose += self.allocate(n, reach) or []

    @rule(elapsed_ms=st.sampled_from([0, 0, 0, 1000, RECENT_MS - 1, RECENT_MS, IDLE_MS]))
    def begin_step(self, elapsed_ms: int) -> None:
        self.now += elapsed_ms
        before = self.blocks()
        standing = self.cache.owners.protection.of
        used_ms = {prefix: standing(node).used_ms for prefix, (_, node) in before.items()}
        self.cache.begin_step()
        self.promised = [one for one in self.promised if one[1] > self.now]
        gone = before.keys() - self.in_the_tree().keys()
        for prefix in gone:
            assert self.now - used_ms[prefix] >= IDLE_MS
        for _, node in self.blocks().values():
            assert standing(node).num_protectors or self.now - standing(node).used_ms < IDLE_MS
        self.known -= gone

    @rule(tenant=tenants, floor=st.integers(0, 6), quota=st.sampled_from([0, 1, 3, 5, 8, 99, 99]))
    def share(self, tenant: str, floor: int, quota: int) -> None:
        self.cache.set_share(tenant, floor=floor, quota=quota)
        others = sum(value for name, value in self.floors.items() if name != tenant)
        limit = int((self.cache.num_blocks - 1) * 0.6)
        self.floors[tenant], self.quotas[tenant] = min(floor, quota, limit - others), quota

    @precondition(lambda self: self.sequences)
    @rule(index=pick)
    def pin(self, index: int) -> None:
        sequence = self.some(index)
        num_pinned = self.cache.pin(sequence.handle)
        assert num_pinned in (0, sequence.handle.num_tree_blocks)
        assert self.cache.num_pinned <= self.cache.owners.pool.num_blocks

    @precondition(lambda self: self.sequences)
    @rule(index=pick, num_tokens=st.integers(0, 11), ttl_ms=st.sampled_from([1, 1000, RECENT_MS]))
    def pin_for_a_while(self, index: int, num_tokens: int, ttl_ms: int) -> None:
        sequence, retention = self.some(index), self.cache.retention
        before = self.cache.num_pinned
        num_pinned = self.cache.pin_for(sequence.handle, num_tokens, ttl_ms)
        assert num_pinned <= min(num_tokens // SIZE, sequence.handle.num_tree_blocks)
        if num_pinned:
            prefixes = {sequence.prefix(i * SIZE) for i in range(1, num_pinned + 1)}
            self.promised.append((prefixes, self.now + ttl_ms))
        if self.cache.num_pinned > before:
            assert self.cache.num_pinned <= retention.passing_limit

    @rule(tenant=st.sampled_from(["anna", "bert"]))
    def purge(self, tenant: str) -> None:
        before = self.in_the_tree()
        self.cache.purge(tenant)
        gone = {prefix for prefix in before if any(r == tenant.encode() for r, _ in prefix)}
        self.forget(before, gone)
        for sequence in self.sequences:
            sequence.cut_off |= sequence.handle.tenant == tenant
        assert self.num_of(tenant) == sum(
            len(node.block_ids) for node in self.cache.owners.protection.doomed if node.tenant == tenant
        )

    def forget(self, before: dict[Prefix, int], gone: set[Prefix]) -> None:
        self.known -= gone
        assert self.in_the_tree().keys() == before.keys() - gone
        self.cut_off_ids |= {before[prefix] for prefix in gone}
        self.promised = [one for one in self.promised if not one[0] & gone]

    @rule(region=st.sampled_from([PUBLIC, ANNA, BERT]), drop=st.sampled_from([False, False, True]))
    def unpin_or_drop(self, region: bytes, drop: bool) -> None:
        if not drop:
            self.cache.unpin(region)
            self.promised = [one for one in self.promised if max(one[0], key=len)[-1][0] != region]
            return
        before = self.in_the_tree()
        self.cache.drop(region)
        gone = {prefix for prefix in before if any(owner == region for owner, _ in prefix)}
        self.forget(before, gone)
        for sequence in self.sequences:
            tree_part = sequence.prefix(sequence.handle.num_tree_blocks * SIZE)
            sequence.cut_off |= any(owner == region for owner, _ in tree_part)

    # What must hold after every operation.

    @invariant()
    def laws(self) -> None:
        self.cut_off_ids -= set(self.cache.owners.pool.free_ids())
        invariants.check(self.cache, [s.handle for s in self.sequences])
        found = self.in_the_tree()
        assert found.keys() == self.known
        assert self.cache.num_free + self.cache.num_evictable == self.cache.available(LAST_RESORT)
        assert all(self.known >= prefixes for prefixes, _ in self.promised), "a pin was broken"

    @invariant()
    def every_slot_holds_the_prefix_that_its_table_says(self) -> None:
        for sequence in self.sequences:
            for position in range(sequence.num_computed):
                block = sequence.table[position // SIZE]
                assert self.shadow[block, position % SIZE] == sequence.prefix(position + 1)

    @invariant()
    def every_prefix_in_the_tree_is_in_its_block(self) -> None:
        for prefix, block in self.in_the_tree().items():
            assert self.shadow[block, SIZE - 1] == prefix

    @invariant()
    def counts_are_owners(self) -> None:
        owners = [0] * self.cache.num_blocks
        for sequence in self.sequences:
            for block in sequence.table[sequence.handle.num_tree_blocks :]:
                owners[block] += 1
        for block in self.loose:
            owners[block] += 1
        for block in range(self.cache.num_blocks):
            owners[block] += self.cache.owners.in_tree[block]
        assert owners == [self.cache.refcount(block) for block in range(self.cache.num_blocks)]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.sequences:
            self.finish(0)
        self.allocate_loose(0)
        for region in (PUBLIC, ANNA, BERT):
            self.cache.unpin(region)
        invariants.check(self.cache, [])
        num_blocks = self.cache.num_blocks - 1
        assert self.cache.available(LAST_RESORT) == num_blocks, "blocks leaked"
        assert self.allocate(num_blocks, LAST_RESORT) is not None


CacheMachine.TestCase.settings = settings(
    max_examples=75,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def at_length(machine: type[RuleBasedStateMachine]) -> type:
    """Returns the test of more examples, which `make soak` runs."""

    class Longer(machine):
        pass

    Longer.TestCase.settings = settings(CacheMachine.TestCase.settings, max_examples=1500)
    return pytest.mark.slow(Longer.TestCase)
