"""Formats of strings as expressions. Each matches only texts that the format's own standard allows, but not all of
them.

Dates are real ones (29 February is left out), times have no leap second, host names and addresses are ASCII.
"""

from __future__ import annotations

_YEAR = r"(?:[1-9]\d{3})"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE = f"{_YEAR}-{_DAY}"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = r"[0-9a-f]{1,4}"
_PATH = r"(?:[A-Za-z0-9._~-]|%[0-9A-F]{2})"
_NUMBER = r"(?:0|[1-9]\d{0,5})"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        rf"P(?:{_NUMBER}W"
        rf"|(?:{_NUMBER}D|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?)"
        rf"(?:T{_NUMBER}H)?|T(?:{_NUMBER}S|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}H(?:{_NUMBER}M)?))"
    ),
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "email": rf"[A-Za-z0-9](?:[A-Za-z0-9_+-]|\.[A-Za-z0-9]){{0,30}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": rf"(?:{_GROUP}(?::{_GROUP}){{7}}|(?:{_GROUP}(?::{_GROUP}){{0,5}})?::(?:{_GROUP})?)",
    "uri": rf"https?://{_HOST}(?::[1-9]\d{{0,3}})?(?:/{_PATH}*)*(?:\?(?:{_PATH}|[=&])*)?(?:#{_PATH}*)?",
}

ANNOTATIONS = frozenset({"int32", "int64", "float", "double"})
"""Formats of numbers: they restrict nothing here."""
