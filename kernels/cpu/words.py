"""The words that describe a call of the compiled layers, and where each lies in memory.

It knows names and offsets. It does not know what is computed. A caller (`kernels.cpu.layers`) writes the words in the
order of the tables; the compiled functions (`kernels.cpu.decoder`) read them at the offsets.
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
    "block_size",
    "kind",  # of the products (`product`)
    "narrow",  # KV is bfloat16, else float32
    "layer_words",  # [layers, len(LAYER)]
    "layer_numbers",  # [layers, len(NUMBERS)] float32
    "states",  # [lines, hidden] float32, changed in place
    "projected",  # [lines, (heads + 2 kv_heads) * head_dim] float32
    "attended",  # [lines, heads * head_dim], inputs of a product
    "fed",  # [lines, inner], inputs of a product: what the gate gives; with experts [lines * chosen, inner]
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
    "experts",  # of a layer that has any
    "chosen",  # experts of a line
    "score_panels",  # panels of a router
    "scores",  # [lines, score_panels * 32] float32
    "shares",  # [lines, chosen] float32
    "choices",  # [lines, chosen]: experts
    "used",  # the number of experts that any line takes, and behind it which
    "firsts",  # [experts + 1]: places of the first pairs of each expert, and behind it the first free ones [experts]
    "slots",  # [lines, chosen]: the place of each pair in the order of experts
    "gathered",  # [lines * chosen, hidden], inputs of a product
    "outputs",  # [lines * chosen, hidden] float32
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
    "inner",  # outputs of the gate
    "router",  # of a layer with experts, whose weights lie one behind the other
    "renormalised",  # the shares of a line's experts add up to 1
    "norm_before",
    "norm_before_bias",  # makes it a LayerNorm; without a bias a norm is an RMSNorm
    "norm_behind",
    "norm_behind_bias",
    "norm_attended",  # of what attention adds to the states
    "norm_fed",  # of what the gated products add
    "norm_query",
    "norm_key",
    "turns",  # [positions, turned] float32 (`pointwise.rotate`)
    "turned",  # columns of a head that are rotated, its first ones
    "kv",
    "window",
    "gate",  # the gate's function (`pointwise.activated`)
    "gated",  # it is multiplied by a second product
    "parallel",  # both parts of the layer take the states that are its input
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
    BLOCK_SIZE,
    KIND,
    NARROW,
    LAYER_WORDS,
    LAYER_NUMBERS,
    STATES,
    PROJECTED,
    ATTENDED,
    FED,
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
    EXPERTS,
    CHOSEN,
    SCORE_PANELS,
    SCORES,
    SHARES,
    CHOICES,
    USED,
    FIRSTS,
    SLOTS,
    GATHERED,
    OUTPUTS,
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
    INNER,
    ROUTER,
    RENORMALISED,
    NORM_BEFORE,
    NORM_BEFORE_BIAS,
    NORM_BEHIND,
    NORM_BEHIND_BIAS,
    NORM_ATTENDED,
    NORM_FED,
    NORM_QUERY,
    NORM_KEY,
    TURNS,
    TURNED,
    KV,
    WINDOW,
    GATE,
    GATED,
    PARALLEL,
) = range(0, 8 * len(LAYER), 8)
EPS_BEFORE, EPS_BEHIND, EPS_ATTENDED, EPS_FED, EPS_HEADS, SCALE, SOFTCAP = range(0, 4 * len(NUMBERS), 4)
PART_BYTES, LAYER_BYTES, NUMBER_BYTES = 8 * len(PART), 8 * len(LAYER), 4 * len(NUMBERS)
