"""Names in the environment that no process of Headgate knows. A typing error in a name would be a setting without
effect."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from accounting.values.setting_rows import NAMES

PREFIX = "HEADGATE_"
# Tests and benchmarks have many variables, which need no documentation.
TEST_PREFIXES = ("HEADGATE_TEST_", "HEADGATE_BENCH_", "HEADGATE_SOAK")


def unknown(names: Iterable[str], also: Collection[str] = ()) -> str | None:
    """Returns one sentence about the first of `names` that has Headgate's prefix and is not known, or None. `also` has
    further known names."""
    known = NAMES.union(also)
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in known and not name.startswith(TEST_PREFIXES):
            ends = [one.removeprefix(PREFIX) for one in known]
            meant = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.7)
            hint = f"Did you mean {PREFIX}{meant[0]}?" if meant else "See docs/configuration.md."
            return f"The environment variable {name} is unknown. {hint}"
    return None
