"""The list of screens: label, path and the roles that see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.console.viewer import Role

ALL: frozenset[Role] = frozenset(("operator", "finance", "admin", "viewer"))
OPERATORS: frozenset[Role] = frozenset(("operator", "finance"))
TENANTS: frozenset[Role] = frozenset(("admin", "viewer"))


@dataclass(frozen=True, slots=True)
class ScreenLink:
    label: str
    path: str
    roles: frozenset[Role] = ALL


SCREENS = (
    ScreenLink("Home", ""),
    ScreenLink("Requests", "/requests"),
    ScreenLink("Workers", "/workers", OPERATORS),
    ScreenLink("Cache", "/cache", OPERATORS),
    ScreenLink("Fairness", "/fairness", OPERATORS),
    ScreenLink("Webhooks", "/webhooks", OPERATORS),
)


def screens_of(role: Role) -> Sequence[ScreenLink]:
    return [screen for screen in SCREENS if role in screen.roles]
