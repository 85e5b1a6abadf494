"""Settings as an operator may read them: what opens another system is masked, and all else stays readable. It is pure.

A password inside a URL is masked alone. A value is masked whole only where the whole of it is a secret.
"""

from __future__ import annotations

import re

MASK = "***"
_WHOLE = re.compile(r"(?:^|_)(?:api_?key|secret|password|passwd|token|pepper|credential)$", re.IGNORECASE)
_FILES = frozenset({"engine_shared_cache_secret"})
"""Settings that name the file of a secret."""
_PASSWORD = re.compile(r"(://[^:@/?#\s\"]*):[^\s\"]*@")
"""A password ends at the last `@`, because one that is not encoded may hold any other character."""
_PARAMETER = re.compile(
    r"([?&][^=&\s\"]*(?:secret|passw|token|pepper|api_?key|credential)[^=&\s\"]*=)[^&\s\"#]*", re.IGNORECASE
)
_MAYBE_SECRET = re.compile(
    r"(\"[^\"]*(?:secret|passw|token|api_?key|credential|\bkey)\"\s*:\s*)\"[^\"]*\"", re.IGNORECASE
)
"""A field of JSON that may hold a credential, though no setting asks for one there."""


def text(value: str) -> str:
    """Returns a text in which passwords and secret parameters of URLs, and secret fields of JSON, are masked."""
    value = _PASSWORD.sub(rf"\1:{MASK}@", value)
    return _MAYBE_SECRET.sub(rf'\1"{MASK}"', _PARAMETER.sub(rf"\1{MASK}", value))


def setting(name: str, value: str) -> str:
    """Returns the value of a setting. `name` is its name with or without the prefix of variables, in either case."""
    field = name.lower().removeprefix("headgate_")
    if value and field not in _FILES and _WHOLE.search(field):
        return MASK
    if field.endswith(("url", "endpoint")) and "://" not in value and "@" in value:
        return f"{MASK}@{value.rpartition('@')[2]}"  # it is no URL, and has what may be a password
    return text(value)
