"""All laws of the cache, checked at once. A broken law raises with a dump of the state.

Property tests call it after every operation, and an idle worker calls it law by law. It is O(pool + tree) and changes
nothing.

The numbers are those of the design: (1) each block in one place, (2) protectors, (3) heap entries, (4) lengths, (5)
regions, (6) handles end where they say, (7) counts per tenant and the blocks within each reach. The eighth, shadow KV,
needs to know what was written into the blocks: the property tests check it. Eviction and pins build on two more: (9) a
node has at least the priority of its descendants and was used as late, (10) blocks under pins are counted. The host
tier has (11): each slot is in one place, counted for its tenant, and no copy exists without those before it. Side tables
have (12): none names a node that is gone, and every node has a standing.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from cache.blocks.block_pool import NULL_BLOCK
from cache.blocks.eviction import Entry, Leaves, Standing
from cache.blocks.ownership import Ownership
from cache.blocks.usage import COLD, LAST_RESORT, SHARED
from cache.prefix_cache import PrefixCache
from cache.tree.handle import Handle
from cache.tree.radix import Node


@dataclass(frozen=True)
class Seen:
    """The cache as the laws look at it. The tree is walked once for all of them."""

    cache: PrefixCache
    handles: list[Handle] | None
    """All handles that are not released. None stands for not known."""
    tree: list[Node]
    """The nodes of the tree, parents first."""
    nodes: list[Node]
    """These, and the ones that a drop unlinked while somebody used them."""

    @property
    def owners(self) -> Ownership:
        return self.cache.owners

    @functools.cached_property
    def protectors(self) -> dict[Node, int]:
        """The number of protectors of each of the nodes."""
        standing_of = self.cache.owners.protection.of
        return {node: standing_of(node).num_protectors for node in self.nodes}


def see(cache: PrefixCache, handles: Iterable[Handle] | None = None) -> Seen:
    """Returns what the laws look at, which holds until the cache changes."""
    live = None if handles is None else [handle for handle in handles if not handle.released]
    tree = list(cache.owners.tree.nodes())
    return Seen(cache, live, tree, [*tree, *cache.owners.protection.doomed])


class InvariantBroken(AssertionError):
    """A law is broken. The message lists the broken laws and dumps the state."""


def check(cache: PrefixCache, handles: Iterable[Handle] | None = None) -> None:
    """Raises InvariantBroken unless every law holds. With all live handles given, protectors are checked exactly,
    otherwise only for a minimum."""
    seen = see(cache, handles)
    # The other laws are read off the tables.
    broken = list(_side_tables(seen)) or [sentence for law in LAWS[:-1] for sentence in law(seen)]
    if broken:
        raise InvariantBroken("\n".join([*broken, dump(cache)]))


def dump(cache: PrefixCache) -> str:
    """Returns the state in words: one line per node, indented by depth, then the blocks that are free or private."""
    owners = cache.owners
    lines = [f"step {cache.step}, free {cache.num_free}, evictable {cache.num_evictable}"]
    depths = {owners.tree.root: 0}
    for node in owners.tree.nodes():
        depths.update(dict.fromkeys(node.children.values(), depths[node] + 1))
        lines.append("  " * depths[node] + _described(owners, node))
    doomed = sorted(owners.protection.doomed, key=lambda node: node.id)
    lines += [f"unlinked: {_described(owners, node)}" for node in doomed]
    lines.append(f"free: {sorted(owners.pool.free_ids())}")
    counts = {block: owners.pool.refcount(block) for block in range(cache.num_blocks) if not owners.in_tree[block]}
    lines.append(f"private (block: owners): { {block: n for block, n in counts.items() if n} }")
    return "\n".join(lines)


def _described(owners: Ownership, node: Node) -> str:
    """Returns a node in words, with what the side tables say of it."""
    try:
        standing: Standing | str = owners.protection.of(node)
    except KeyError:
        standing = "no standing"
    pinned = ", pinned" if node in owners.pins else ""
    return f"{node!r}, {standing!r}, guests={owners.guests.num_at(node)}{pinned}"


def _blocks_in_one_place(seen: Seen) -> Iterator[str]:
    """Compares numbers of blocks and asks for each that is free or in the tree, because a loop over the pool takes most of
    a check's time. Only where something is wrong does it look for the block."""
    owners = seen.owners
    counts, guests = owners.pool.counts(), owners.guests.counts()[0]
    stack, edges = owners.pool.free_ids(), list(chain.from_iterable([node.block_ids for node in seen.nodes]))
    free, tree = set(stack), set(edges)
    if len(stack) + len(edges) != len(free | tree):
        named = Counter([*stack, *edges])
        yield f"(1) blocks in two places, free stack or tree: {[b for b, n in named.items() if n > 1]}"
    if NULL_BLOCK in free or NULL_BLOCK in tree:
        yield "(1) the null block was handed out"
    free.discard(NULL_BLOCK)
    tree.discard(NULL_BLOCK)
    num_unowned = counts.count(0) - (counts[NULL_BLOCK] == 0)
    if num_unowned != len(free) or any(map(counts.__getitem__, free)):
        unowned = {block for block, owned in enumerate(counts) if not owned} - {NULL_BLOCK}
        for block in unowned ^ free:
            yield f"(1) block {block} has {counts[block]} owners and is {'' if block in free else 'not '}free"
    num_unmarked = owners.in_tree.count(0) - (not owners.in_tree[NULL_BLOCK])
    if num_unmarked != len(counts) - 1 - len(tree) or not all(map(owners.in_tree.__getitem__, tree)):
        for block in ({block for block, marked in enumerate(owners.in_tree) if marked} ^ tree) - {NULL_BLOCK}:
            yield f"(1) block {block}: the in_tree mark says {owners.in_tree[block]}"
    if guests or max(map(counts.__getitem__, tree), default=0) > 1:
        for block in {block for block in tree if counts[block] > 1} ^ (tree & guests.keys()):
            yield f"(1) tree block {block} has {counts[block]} owners, guest: {block in guests}"
    for block in owners.moving:
        if block in free or block in tree or counts[block] != 1:
            yield f"(1) block {block} is moving and has {counts[block]} owners"
    protectors = seen.protectors
    evictable = sum([len(node.block_ids) for node in seen.tree if not protectors[node]])
    if evictable != owners.usage.num_evictable:
        yield f"(1) {evictable} blocks are evictable, the count says {owners.usage.num_evictable}"


def _protectors(seen: Seen) -> Iterator[str]:
    owners, protectors = seen.owners, seen.protectors
    least: defaultdict[Node | None, int] = defaultdict(int)
    for handle in seen.handles or ():
        least[handle.node] += 1
    for node, number in protectors.items():
        if number:
            least[node.parent] += 1
    guests, counts = owners.guests.counts()
    if counts != Counter(guests.values()):
        yield f"(2) the nodes have {Counter(guests.values())} guests, the counts say {counts}"
    for node, number in protectors.items():
        own = least[node] + (node in owners.pins) + bool(counts.get(node))
        if number < own or (seen.handles is not None and number != own):
            yield f"(2) {_described(owners, node)} should have {own} protectors"
    for node in owners.protection.doomed:
        if not protectors[node]:
            yield f"(2) {node!r} was dropped, nobody holds it, and it is still here"


def _heap_entries(seen: Seen) -> Iterator[str]:
    owners = seen.owners
    protection = owners.protection
    live: dict[bool, dict[Node, Entry]] = {False: {}, True: {}}
    for recent, leaves in ((False, protection.cold), (True, protection.recent)):
        for tenant, heap in leaves.heaps.items():
            entries = set(map(id, heap.entries()))
            if not entries.issuperset(map(id, heap.live())):
                yield f"(3) the heap of {tenant!r} lacks a live entry"
                return  # the coldest leaf of such a heap cannot be found
            live[recent].update((entry[3], entry) for entry in heap.live())
        yield from _tops(leaves)
    for node in seen.nodes:
        standing = protection.of(node)
        evictable_leaf = not (standing.num_protectors or node.children or node.parent is None)
        entry = live[node in protection.recent_by_use].pop(node, None)
        if evictable_leaf != (entry is not None):
            yield f"(3) {_described(owners, node)}: evictable leaf {evictable_leaf}, entry {entry is not None}"
        if entry is not None and entry[:3] != (standing.priority, standing.last_used, node.id):
            yield f"(3) {_described(owners, node)} sits in the heap as {entry[:3]}"
    for node in [*live[False], *live[True]]:
        yield f"(3) {node!r} sits in a heap and should not"


def _tops(leaves: Leaves) -> Iterator[str]:
    first = leaves.coldest()
    heads = [(leaves.rank(tenant), *min(heap.live())[:3]) for tenant, heap in leaves.heaps.items() if heap.num_live]
    if (first[:4] if first else None) != min(heads, default=None):
        yield f"(3) {first} is first among tenants, it should be {min(heads, default=None)}"


def _tenants(seen: Seen) -> Iterator[str]:
    owners = seen.owners
    held: defaultdict[str, int] = defaultdict(int)
    retained: defaultdict[str, int] = defaultdict(int)
    recent: defaultdict[str, int] = defaultdict(int)
    for node, number in seen.protectors.items():
        (held if number else retained)[node.tenant] += len(node.block_ids)
        if node in owners.protection.recent_by_use:
            recent[node.tenant] += len(node.block_ids)
    usage = owners.usage
    within = dict.fromkeys((SHARED, COLD, LAST_RESORT), 0)
    for tenant in {*usage.tenants(), *held, *retained}:
        kept, counted = retained[tenant], usage.numbers(tenant)
        if (counted.held, counted.retained) != (held[tenant], kept):
            yield f"(7) {tenant!r} has {held[tenant]} held, {kept} retained blocks; the counts say {usage.of(tenant)}"
        if counted.recent != recent[tenant]:
            yield f"(7) {tenant!r} has {recent[tenant]} recent blocks; the counts say {usage.of(tenant)}"
        above = max(0, held[tenant] + kept - counted.floor)
        for reach in within:
            evictable = kept if reach.recent else kept - recent[tenant]
            within[reach] += evictable if reach.floors else min(evictable, above)
    for reach, num_blocks in within.items():
        if usage.available(reach) != num_blocks:
            yield f"(7) {num_blocks} blocks are within {reach}, the count says {usage.available(reach)}"


def _order(seen: Seen) -> Iterator[str]:
    owners = seen.owners
    protection = owners.protection
    for node in seen.tree:
        for child in node.children.values():
            if node.parent is not None and protection.priority(node) < protection.priority(child):
                yield f"(9) {_described(owners, node)} is worth less than {_described(owners, child)}"
    earlier: set[Node] = set()
    last_ms = 0
    for node in protection.by_use:
        used_ms = protection.of(node).used_ms
        if not earlier.issuperset(node.children.values()) or used_ms < last_ms:
            yield f"(9) {node!r} comes too early in the order of use"
        last_ms = used_ms
        earlier.add(node)
    evictable = {node for node in seen.tree if not seen.protectors[node] and node.parent is not None}
    if evictable != earlier:
        yield f"(9) evictable nodes {evictable}, in the order of use {earlier}"
    if list(protection.recent_by_use) != [node for node in protection.by_use if node in protection.recent_by_use]:
        yield "(9) the order of use of recent nodes has others"


def _pins(seen: Seen) -> Iterator[str]:
    pins, limit, nodes = seen.owners.pins, seen.cache.retention.pin_limit, seen.nodes
    covers = {node: number for node in nodes if (number := pins.covers(node))}
    below = Counter([node.parent for node in covers])
    for node in nodes if covers or len(pins) else ():
        should = (node in pins) + below[node]
        if node.parent is not None and covers.get(node, 0) != should:
            yield f"(10) {node!r} has {pins.covers(node)} pins, it should be {should}"
    pinned = sum([len(node.block_ids) for node in covers])
    if not pinned == pins.num_blocks <= limit:
        yield f"(10) {pinned} blocks are under pins, the count says {pins.num_blocks}"
    by_tenant: defaultdict[str, int] = defaultdict(int)
    for node in covers:
        by_tenant[node.tenant] += len(node.block_ids)
    usage = seen.owners.usage
    for tenant in {*by_tenant, *usage.tenants()}:
        if usage.num_pinned(tenant) != by_tenant[tenant]:
            yield f"(10) {by_tenant[tenant]} blocks of {tenant} are under pins, not {usage.num_pinned(tenant)}"


def _lengths_and_links(seen: Seen) -> Iterator[str]:
    owners = seen.owners
    size = owners.tree.block_size
    for node in seen.tree:
        if len(node.tokens) != size * len(node.block_ids) or len(node.hashes) != len(node.block_ids):
            yield f"(4) {node!r}: {len(node.tokens)} tokens, {len(node.hashes)} hashes"
        if not node.block_ids and node.parent is not None:
            yield f"(4) {node!r} is an empty edge"
        for key, child in node.children.items():
            if child.parent is not node or key != (child.region, child.tokens[:size].tobytes()):
                yield f"(4) {child!r} hangs in the wrong place"


def _regions(seen: Seen) -> Iterator[str]:
    owners = seen.owners
    left: dict[Node, frozenset[bytes]] = {owners.tree.root: frozenset()}
    for node in seen.tree:
        for child in node.children.values():
            left[child] = left[node] if child.region == node.region else left[node] | {node.region}
            if child.region in left[child]:
                yield f"(5) {child!r} returns to a region that its path had left"


def _handle_ends(seen: Seen) -> Iterator[str]:
    for handle in seen.handles or []:
        depth, node = 0, handle.node
        while node.parent is not None:
            depth, node = depth + len(node.block_ids), node.parent
        if depth != handle.num_tree_blocks:
            yield f"(6) {handle!r} ends {depth} blocks deep"


def _host(seen: Seen) -> Iterator[str]:
    if seen.cache.host is not None:
        yield from seen.cache.host.broken()
        for node in seen.nodes:
            if seen.owners.offers is not None and seen.owners.offers.num_offered(node) > len(node.block_ids):
                yield f"(11) {node!r} offered more blocks to the host than it has"


def _side_tables(seen: Seen) -> Iterator[str]:
    owners = seen.owners
    here = set(seen.nodes)
    for table in (owners.protection, owners.guests, owners.pins, owners.offers):
        if table is not None and not here.issuperset(table.named()):
            for gone in set(table.named()) - here:
                yield f"(12) {type(table).__name__} names {gone!r}, which is gone"
    for node in here.difference(owners.protection.named()):
        yield f"(12) {node!r} has no standing"
    watch = owners.tree.watch
    if watch is not None and (wrong := set(watch.named()) ^ {n for n in seen.tree if n.parent is not None}):
        yield f"(12) the watch of groups and the tree differ by {wrong}"


LAWS: tuple[Callable[[Seen], Iterator[str]], ...] = (
    _blocks_in_one_place,
    _protectors,
    _heap_entries,
    _tenants,
    _order,
    _pins,
    _lengths_and_links,
    _regions,
    _handle_ends,
    _host,
    _side_tables,
)
"""The laws. Each yields a sentence for everything it finds broken. `check` asks the last one first."""
