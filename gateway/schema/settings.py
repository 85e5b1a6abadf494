"""The settings of a process as text for the operator, with what opens other systems masked. The module is pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from gateway.base.settings import PREFIX
from workers.process import masked


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
    return masked.setting(name, _text(value))


def _text(value: Any) -> str:
    if isinstance(value, tuple | list | frozenset):
        return ", ".join(map(_text, value))
    if isinstance(value, Mapping):
        plain = {str(key): one.model_dump() if isinstance(one, BaseModel) else one for key, one in value.items()}
        return json.dumps(plain, default=str)
    return str(value)
