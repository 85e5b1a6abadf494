"""The settings of a process as text for the operator, with what opens other systems masked. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from yarl import URL

from gateway.base.settings import PREFIX

MASK = "***"
_SECRET = re.compile(r"secret|password|passwd|token|pepper|api_?key|credential", re.I)


def shown(settings: BaseModel) -> list[dict[str, Any]]:
    """Returns each setting by the name of its variable, in the order of the class, and whether it was set."""
    return [
        {
            "name": PREFIX + field.upper(),
            "value": _masked(field, getattr(settings, field)),
            "is_set": field in settings.model_fields_set,
        }
        for field in type(settings).model_fields
        if not field.startswith("test_")
    ]


def _masked(name: str, value: Any) -> str | None:
    if value is None or value == "":
        return None
    if _SECRET.search(name):
        return MASK
    text = _text(value)
    return without_secrets(text) if "://" in text else text


def without_secrets(url: str) -> str:
    """Returns an address without its password and without secret values of its query."""
    try:
        parsed = URL(url)
        password = parsed.password
    except ValueError:
        return MASK
    secrets = {name for name in parsed.query if _SECRET.search(name)}
    if password is None and not secrets:
        return url
    masked = parsed if password is None else parsed.with_password(MASK)
    kept = [(name, MASK if name in secrets else value) for name, value in parsed.query.items()]
    return str(masked.with_query(kept) if kept else masked)


def _text(value: Any) -> str:
    if isinstance(value, tuple | list | frozenset):
        return ", ".join(map(_text, value))
    if isinstance(value, Mapping):
        plain = {str(key): one.model_dump() if isinstance(one, BaseModel) else one for key, one in value.items()}
        return json.dumps(plain, default=str)
    return str(value)
