"""The words that describe a call of the compiled layers, and where each lies in memory.

Knows names and offsets. Does not know what is computed. A caller (`kernels.cpu.layers`) writes the words in the order of
the tables; the compiled functions (`kernels.cpu.decoder`) read them at the offsets.
"""

from __future__ import annotations

JOB = (
    "lines",
    "parts",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "inner",  # outputs of the gate
    "block_size",
    "kind",  # of the products (`product`)
    "narrow",  # KV is bfloat16, else float32
    "layer_words",  # [layers, len(LAYER)]
    "layer_numbers",  # [layers, len(NUMBERS)] float32
    "states",  # [lines, hidden] float32, changed in place
    "projected",  # [lines, (heads + 2 kv_heads) * head_dim] float32
    "attended",  # [lines, heads * head_dim], inputs of a product
    "gated",  # [lines, inner], inputs of a product
    "added",  # [lines, hidden] float32: what a part of a layer adds, where it is normed first; else 0
    "positions",  # [lines]: of the tokens
    "part_words",  # [parts, len(PART)]
    "stores",  # keys and values are stored before attention begins, else by the piece that attends to them
    "normed",  # [lines, hidden], inputs of a product; 0 if each thread norms all lines for itself
    "threads",
    "counters",  # one counter of threads, then those of each stage (`team`), zeros at first
    "private",  # `private_bytes` bytes for each thread
    "private_bytes",
    "in_tiles",  # attention takes the matrix unit
)
"""Words of a call, int64: sizes, and addresses of data."""
PART = (
    "first",
    "end",
    "place",  # position of the first line's key in the row's KV
    "table",  # address of the row's int64 block ids
)
"""Words of a part, which is a run of consecutive lines of one row; a piece of attention is one part and one KV head."""
LAYER = (
    "qkv",
    "qkv_bias",
    "output",
    "output_bias",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
    "norm_before",
    "norm_behind",
    "norm_attended",  # of what attention adds to the states
    "norm_fed",  # of what the gated products add
    "norm_query",
    "norm_key",
    "turns",  # [positions, head_dim] float32 (`pointwise.rotate`)
    "kv",
    "window",
    "gate",  # the gate's function (`pointwise.gate_mul`)
)
"""Words of a layer: addresses, 0 if it has no such tensor."""
NUMBERS = ("eps_before", "eps_behind", "eps_attended", "eps_fed", "eps_heads", "scale", "softcap")

(
    LINES,
    PARTS,
    LAYERS,
    HIDDEN,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    INNER,
    BLOCK_SIZE,
    KIND,
    NARROW,
    LAYER_WORDS,
    LAYER_NUMBERS,
    STATES,
    PROJECTED,
    ATTENDED,
    GATED,
    ADDED,
    POSITIONS,
    PART_WORDS,
    STORES,
    NORMED,
    THREADS,
    COUNTERS,
    PRIVATE,
    PRIVATE_BYTES,
    IN_TILES,
) = range(0, 8 * len(JOB), 8)
FIRST, END, PLACE, TABLE = range(0, 8 * len(PART), 8)
(
    QKV,
    QKV_BIAS,
    OUTPUT,
    OUTPUT_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    DOWN,
    DOWN_BIAS,
    NORM_BEFORE,
    NORM_BEHIND,
    NORM_ATTENDED,
    NORM_FED,
    NORM_QUERY,
    NORM_KEY,
    TURNS,
    KV,
    WINDOW,
    GATE,
) = range(0, 8 * len(LAYER), 8)
EPS_BEFORE, EPS_BEHIND, EPS_ATTENDED, EPS_FED, EPS_HEADS, SCALE, SOFTCAP = range(0, 4 * len(NUMBERS), 4)
PART_BYTES, LAYER_BYTES, NUMBER_BYTES = 8 * len(PART), 8 * len(LAYER), 4 * len(NUMBERS)
