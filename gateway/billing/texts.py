"""The words of documents, the same in PDF, HTML and XML. The module is pure."""

from __future__ import annotations

from accounting.billing.invoice_lines import Line
from accounting.values.texts import is_hidden

CLASSES = {
    "cache_read": "cached input",
    "cache_write": "input, kept in the cache",
    "uncached": "input",
    "output": "output",
    "residency_cache": "kept in the cache (GB h)",
    "residency_pinned": "pinned in the cache (GB h)",
}
TIERS = {"": "", "interactive": "", "batch": "batch"}
KINDS = {
    "adjustment": "Adjustment",
    "credit_note": "Credit",
    "prepaid": "Paid from prepaid credit",
    "rounding": "Rounding carried between documents",
}


def safe(text: str) -> str:
    """Shows what is invisible instead of obeying it: control characters and changes of direction become `<U+202E>`."""
    return "".join(f"<U+{ord(char):04X}>" if is_hidden(char) else char for char in text)


def line_title(line: Line) -> str:
    return KINDS[line.kind] if line.kind != "usage" else f"{line.model}: {CLASSES[line.token_class]}"


def line_detail(line: Line, period: str) -> str:
    """`period` is the document's: usage of another month says so."""
    late = f"used in {line.period}" if line.period != period else ""
    if line.kind != "usage":
        return ", ".join(filter(None, (line.model, line.note, line.credit_id, late)))
    requests = f"{line.num_requests:,} requests" if line.num_requests else ""
    return ", ".join(filter(None, (TIERS[line.tier], f"price {line.price_version}", requests, late)))
