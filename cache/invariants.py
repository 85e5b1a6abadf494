"""All laws of the cache, checked at once. A broken law raises with a dump of the state.

Property tests call it after every operation, and an idle worker calls it law by law. It is O(pool + tree) and changes
nothing.

The numbers are those of the design: (1) each block in one place, (2) protectors, (3) heap entries, (4) lengths, (5)
regions, (6) handles end where they say, (7) counts per tenant and the blocks within each reach. The eighth, shadow KV,
needs to know what was written into the blocks: the property tests check it. Eviction and pins build on two more: (9) a
node has at least the priority of its descendants and was used as late, (10) blocks under pins are counted. The host
tier has (11): each slot is in one place, counted for its tenant, and no copy exists without those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from cache.blocks.block_pool import NULL_BLOCK
from cache.blocks.eviction import Leaves
from cache.blocks.ownership import Ownership
from cache.blocks.usage import COLD, LAST_RESORT, SHARED
from cache.prefix_cache import PrefixCache
from cache.tree.handle import Handle
from cache.tree.radix import Node

Live = list[Handle] | None
"""All handles that are not released. None stands for not known."""


class InvariantBroken(AssertionError):
    """A law is broken. The message lists the broken laws and dumps the state."""


def check(cache: PrefixCache, handles: Iterable[Handle] | None = None) -> None:
    """Raise InvariantBroken unless every law holds. With all live handles given, protectors are checked exactly,
    otherwise only for a minimum."""
    live = None if handles is None else [handle for handle in handles if not handle.released]
    broken = [sentence for law in LAWS for sentence in law(cache, live)]
    if broken:
        raise InvariantBroken("\n".join([*broken, dump(cache)]))


def dump(cache: PrefixCache) -> str:
    """Return the state in words: one line per node, indented by depth, then the blocks that are free or private."""
    owners = cache.owners
    lines = [f"step {cache.step}, free {cache.num_free}, evictable {cache.num_evictable}"]
    depths = {owners.tree.root: 0}
    for node in owners.tree.nodes():
        depths.update(dict.fromkeys(node.children.values(), depths[node] + 1))
        lines.append("  " * depths[node] + repr(node))
    lines += [f"unlinked: {node!r}" for node in sorted(owners.doomed, key=lambda node: node.id)]
    lines.append(f"free: {sorted(owners.pool.free_ids())}")
    counts = {block: owners.pool.refcount(block) for block in range(cache.num_blocks) if not owners.in_tree[block]}
    lines.append(f"private (block: owners): { {block: n for block, n in counts.items() if n} }")
    return "\n".join(lines)


def _all_nodes(owners: Ownership) -> list[Node]:
    return [*owners.tree.nodes(), *owners.doomed]


def _blocks_in_one_place(cache: PrefixCache, _: Live) -> Iterator[str]:
    owners = cache.owners
    free = Counter(owners.pool.free_ids())
    tree = Counter(block for node in _all_nodes(owners) for block in node.block_ids)
    if repeated := [block for block, n in (free + tree).items() if n > 1]:
        yield f"(1) blocks in two places, free stack or tree: {repeated}"
    if NULL_BLOCK in free or NULL_BLOCK in tree:
        yield "(1) the null block was handed out"
    for block in range(1, owners.pool.num_blocks):
        owned = owners.pool.refcount(block)
        if (owned == 0) != (block in free):
            yield f"(1) block {block} has {owned} owners and is {'' if block in free else 'not '}free"
        if bool(owners.in_tree[block]) != (block in tree):
            yield f"(1) block {block}: the in_tree mark says {owners.in_tree[block]}"
        if block in tree and (owned > 1) != (block in owners.guests):
            yield f"(1) tree block {block} has {owned} owners, guest: {block in owners.guests}"
    for block in owners.moving:
        if block in free or block in tree or owners.pool.refcount(block) != 1:
            yield f"(1) block {block} is moving and has {owners.pool.refcount(block)} owners"
    evictable = sum(len(node.block_ids) for node in owners.tree.nodes() if not node.num_protectors)
    if evictable != owners.usage.num_evictable:
        yield f"(1) {evictable} blocks are evictable, the count says {owners.usage.num_evictable}"


def _protectors(cache: PrefixCache, handles: Live) -> Iterator[str]:
    owners = cache.owners
    held = Counter(handle.node for handle in handles or [])
    nodes = _all_nodes(owners)
    children = Counter(node.parent for node in nodes if node.num_protectors and node.parent)
    guests = Counter(owners.guests.values())
    for node in nodes:
        if node.num_guests != guests[node]:
            yield f"(2) {node!r} has {guests[node]} guests"
        least = children[node] + node.pinned + bool(node.num_guests) + held[node]
        if node.num_protectors < least or (handles is not None and node.num_protectors != least):
            yield f"(2) {node!r} should have {least} protectors"
    for node in owners.doomed:
        if not node.num_protectors:
            yield f"(2) {node!r} was dropped, nobody holds it, and it is still here"


def _heap_entries(cache: PrefixCache, _: Live) -> Iterator[str]:
    owners = cache.owners
    live: dict[bool, set[int]] = {}
    for recent, leaves in ((False, owners.protection.cold), (True, owners.protection.recent)):
        live[recent] = set()
        for tenant, heap in leaves.heaps.items():
            mine = [entry for entry in heap.entries() if entry[3].entry is entry]
            live[recent].update(map(id, mine))
            if len(mine) != heap.num_live:
                yield f"(3) {len(mine)} live entries of {tenant!r}, the count says {heap.num_live}"
                return  # the coldest leaf of such a heap cannot be found
        yield from _tops(leaves)
    for node in _all_nodes(owners):
        evictable_leaf = not (node.num_protectors or node.children or node.parent is None)
        if evictable_leaf != (node.entry is not None and id(node.entry) in live[node.is_recent]):
            yield f"(3) {node!r}: evictable leaf {evictable_leaf}, entry {node.entry is not None}"
        if node.entry is not None and node.entry[:3] != (node.priority, node.last_used, node.id):
            yield f"(3) {node!r} sits in the heap as {node.entry[:3]}"


def _tops(leaves: Leaves) -> Iterator[str]:
    first = leaves.coldest()
    heads = [
        (leaves.rank(tenant), *entry[:3])
        for tenant, heap in leaves.heaps.items()
        if heap.num_live and (entry := heap.coldest().entry) is not None
    ]
    if (first[:4] if first else None) != min(heads, default=None):
        yield f"(3) {first} is first among tenants, it should be {min(heads, default=None)}"


def _tenants(cache: PrefixCache, _: Live) -> Iterator[str]:
    owners = cache.owners
    held: Counter[str] = Counter()
    retained: Counter[str] = Counter()
    recent: Counter[str] = Counter()
    for node in _all_nodes(owners):
        (held if node.num_protectors else retained)[node.tenant] += len(node.block_ids)
        recent[node.tenant] += len(node.block_ids) if node.is_recent else 0
    usage = owners.usage
    within = Counter(dict.fromkeys((SHARED, COLD, LAST_RESORT), 0))
    for tenant in {*usage.tenants(), *held, *retained}:
        blocks, kept = usage.of(tenant), retained[tenant]
        if (blocks.num_held, blocks.num_retained) != (held[tenant], kept):
            yield f"(7) {tenant!r} has {held[tenant]} held, {kept} retained blocks; the counts say {blocks}"
        if blocks.num_recent != recent[tenant]:
            yield f"(7) {tenant!r} has {recent[tenant]} recent blocks; the counts say {blocks}"
        above = max(0, held[tenant] + kept - blocks.floor)
        for reach in within:
            evictable = kept if reach.recent else kept - recent[tenant]
            within[reach] += evictable if reach.floors else min(evictable, above)
    for reach, num_blocks in within.items():
        if usage.available(reach) != num_blocks:
            yield f"(7) {num_blocks} blocks are within {reach}, the count says {usage.available(reach)}"


def _order(cache: PrefixCache, _: Live) -> Iterator[str]:
    owners = cache.owners
    for node in owners.tree.nodes():
        for child in node.children.values():
            if node.parent is not None and node.priority < child.priority:
                yield f"(9) {node!r} is worth less than {child!r}"
    seen: set[Node] = set()
    used_ms = 0
    for node in owners.protection.by_use:
        if not seen.issuperset(node.children.values()) or node.used_ms < used_ms:
            yield f"(9) {node!r} comes too early in the order of use"
        used_ms = node.used_ms
        seen.add(node)
    evictable = {n for n in owners.tree.nodes() if not n.num_protectors and n.parent is not None}
    if evictable != seen:
        yield f"(9) evictable nodes {evictable}, in the order of use {seen}"
    if set(owners.protection.recent_by_use) != {node for node in seen if node.is_recent}:
        yield "(9) the order of use of recent nodes has others"


def _pins(cache: PrefixCache, _: Live) -> Iterator[str]:
    retention, nodes = cache.retention, _all_nodes(cache.owners)
    below = Counter(node.parent for node in nodes if node.num_pins)
    for node in nodes:
        if node.parent is not None and node.num_pins != node.pinned + below[node]:
            yield f"(10) {node!r} has {node.num_pins} pins, it should be {node.pinned + below[node]}"
    pinned = sum(len(node.block_ids) for node in nodes if node.num_pins)
    if not pinned == retention.num_blocks <= retention.pin_limit:
        yield f"(10) {pinned} blocks are under pins, the count says {retention.num_blocks}"
    by_tenant = Counter[str]()
    for node in nodes:
        by_tenant[node.tenant] += len(node.block_ids) if node.num_pins else 0
    usage = cache.owners.usage
    for tenant in {*by_tenant, *usage.tenants()}:
        if usage.num_pinned(tenant) != by_tenant[tenant]:
            yield f"(10) {by_tenant[tenant]} blocks of {tenant} are under pins, not {usage.num_pinned(tenant)}"


def _lengths_and_links(cache: PrefixCache, _: Live) -> Iterator[str]:
    owners = cache.owners
    size = owners.tree.block_size
    for node in owners.tree.nodes():
        if len(node.tokens) != size * len(node.block_ids) or len(node.hashes) != len(node.block_ids):
            yield f"(4) {node!r}: {len(node.tokens)} tokens, {len(node.hashes)} hashes"
        if not node.block_ids and node.parent is not None:
            yield f"(4) {node!r} is an empty edge"
        for key, child in node.children.items():
            if child.parent is not node or key != (child.region, child.tokens[:size].tobytes()):
                yield f"(4) {child!r} hangs in the wrong place"


def _regions(cache: PrefixCache, _: Live) -> Iterator[str]:
    owners = cache.owners
    left: dict[Node, frozenset[bytes]] = {owners.tree.root: frozenset()}
    for node in owners.tree.nodes():
        for child in node.children.values():
            left[child] = left[node] if child.region == node.region else left[node] | {node.region}
            if child.region in left[child]:
                yield f"(5) {child!r} returns to a region that its path had left"


def _handle_ends(cache: PrefixCache, handles: Live) -> Iterator[str]:
    for handle in handles or []:
        depth, node = 0, handle.node
        while node.parent is not None:
            depth, node = depth + len(node.block_ids), node.parent
        if depth != handle.num_tree_blocks:
            yield f"(6) {handle!r} ends {depth} blocks deep"


def _host(cache: PrefixCache, _: Live) -> Iterator[str]:
    if cache.host is not None:
        yield from cache.host.broken()
    for node in _all_nodes(cache.owners):
        if node.num_offered > len(node.block_ids):
            yield f"(11) {node!r} offered {node.num_offered} blocks to the host"


LAWS: tuple[Callable[[PrefixCache, Live], Iterator[str]], ...] = (
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
)
"""The laws. Each yields a sentence for everything it finds broken."""
