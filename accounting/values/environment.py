"""Names in the environment that no process of Headgate knows: a typing error in one would be a setting without effect."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from accounting.values.setting_names import NAMES

PREFIX = "HEADGATE_"
# Of tests and benchmarks, which have many and need no page.
TEST_PREFIXES = ("HEADGATE_TEST_", "HEADGATE_BENCH_", "HEADGATE_SOAK")


def unknown(names: Iterable[str], also: Collection[str] = ()) -> str | None:
    """One sentence about the first of `names` that begins as ours and is none; None: all are known. `also`: known too."""
    known = NAMES.union(also)
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in known and not name.startswith(TEST_PREFIXES):
            ends = [one.removeprefix(PREFIX) for one in known]
            meant = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.7)
            hint = f"Did you mean {PREFIX}{meant[0]}?" if meant else "See docs/configuration.md."
            return f"Unknown environment variable {name}. {hint}"
    return None
