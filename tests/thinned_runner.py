"""A scripted model whose KV says which tokens were written by rows that did not see everything before them."""

from __future__ import annotations

from array import array

from fakes import ScriptedRunner

from workers.engine.values.probe import AttentionMass

SPARSE = 1 << 16
"""Added to the tokens that such a row writes; copies of them, wherever they go, have it too."""


class ThinnedRunner(ScriptedRunner):
    def __init__(self, **options):
        super().__init__(**options)
        self.num_observed = 0

    def execute(self, rows):
        self.num_observed += sum(row.probe.num_tokens for row in rows if isinstance(row.probe, AttentionMass))
        return super().execute(rows)

    def copy_blocks(self, pairs):
        assert not {s for s, _ in pairs} & {d for _, d in pairs}, "a chain of copies"
        assert len({d for _, d in pairs}) == len(pairs), "two copies to one block"
        super().copy_blocks(pairs)

    def _write(self, row):
        super()._write(row)
        size = self.block_size
        for place in range(row.kv_start, row.kv_start + len(row.tokens) if row.layout else 0):
            self._kv[row.block_table[place // size]][place % size] |= SPARSE

    def _read(self, row):
        return array("i", (token & ~SPARSE for token in super()._read(row)))

    def text_of(self, block_ids):
        return b"".join(bytes(token % 256 for token in self._kv[block]) for block in block_ids)


def check_tree(drive):
    """Each block in the tree was computed in full sight, and has the tokens of its place."""
    tree, size = drive.cache.owners.tree, drive.cache.block_size
    for node in tree.nodes(tree.root):
        for index, block in enumerate(node.block_ids):
            held = drive.runner._kv[block]
            assert max(held) < SPARSE, "sparse KV in the tree"
            assert held == node.tokens[index * size : (index + 1) * size]
