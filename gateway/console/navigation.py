"""The list of screens: label, path, the group in which they stand, the roles that see them, and the scopes that a
tenant's key needs for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.console.viewer import Role

ALL: frozenset[Role] = frozenset(("operator", "finance", "admin", "viewer"))
OPERATORS: frozenset[Role] = frozenset(("operator", "finance"))
TENANTS: frozenset[Role] = frozenset(("admin", "viewer"))


@dataclass(frozen=True, slots=True)
class ScreenLink:
    label: str
    path: str
    group: str
    roles: frozenset[Role] = ALL
    scopes: Sequence[Collection[str]] = ((),)
    """The scopes that a tenant's key needs for the screen: all of one of these sets."""

    def is_opened_by(self, role: Role, scopes: Collection[str]) -> bool:
        is_enough = role in OPERATORS or any(set(scopes).issuperset(needed) for needed in self.scopes)
        return role in self.roles and is_enough


_USAGE = (("usage:read",),)
SCREENS = (
    ScreenLink("Home", "", "Overview"),
    ScreenLink("Requests", "/requests", "Traffic", scopes=_USAGE),
    ScreenLink("Sessions", "/sessions", "Traffic", scopes=_USAGE),
    ScreenLink("Batches", "/batches", "Traffic", scopes=(("batch",), ("usage:read",))),
    ScreenLink("Playground", "/playground", "Traffic", frozenset(("admin",)), (("chat",),)),
    ScreenLink("Usage", "/usage", "Money", scopes=_USAGE),
    ScreenLink("Invoices", "/invoices", "Money", scopes=_USAGE),
    ScreenLink("Prices", "/prices", "Money", OPERATORS),
    ScreenLink("Anomalies", "/anomalies", "Money", scopes=_USAGE),
    ScreenLink("Tenants", "/tenants", "Access", OPERATORS),
    ScreenLink("Keys", "/keys", "Access", OPERATORS | {"admin"}, (("keys",),)),
    ScreenLink("Limits", "/limits", "Access", TENANTS),
    ScreenLink("Audit log", "/audit", "Access", OPERATORS),
    ScreenLink("Workers", "/workers", "Operation", OPERATORS),
    ScreenLink("Cache", "/cache", "Operation", OPERATORS),
    ScreenLink("Fairness", "/fairness", "Operation", OPERATORS),
    ScreenLink("Books", "/books", "Operation", OPERATORS),
    ScreenLink("Webhooks", "/webhooks", "Operation", OPERATORS | {"admin"}, (("keys", "usage:read"),)),
    ScreenLink("Doctor", "/doctor", "Operation", frozenset(("operator",))),
)


def screens_of(role: Role) -> Sequence[ScreenLink]:
    return [screen for screen in SCREENS if role in screen.roles]


def menu_of(role: Role, scopes: Collection[str]) -> Mapping[str, Sequence[ScreenLink]]:
    """Returns the screens that a key opens by their groups, in the order in which they stand."""
    groups: dict[str, list[ScreenLink]] = {}
    for screen in SCREENS:
        if screen.is_opened_by(role, scopes):
            groups.setdefault(screen.group, []).append(screen)
    return groups


def is_for(role: Role, path: str) -> bool:
    """Returns whether the page at this path, or pattern of paths, belongs to a screen that the role has."""
    of = screen_of(path)
    return all(role in screen.roles for screen in SCREENS if screen.path == of)


def screen_of(path: str) -> str:
    """Returns the path of the screen that a page belongs to: `/requests` for `/requests/req_1`."""
    path = next((screen for page, screen in _PAGES_OF_OTHERS.items() if _is_below(path, page)), path)
    return next((screen.path for screen in SCREENS if screen.path and _is_below(path, screen.path)), "")


_PAGES_OF_OTHERS = {"/issuer": "/invoices", "/upstreams": "/workers"}


def _is_below(path: str, screen: str) -> bool:
    return path == screen or path.startswith(screen + "/")


def has_screen(path: str) -> bool:
    """Returns whether a screen stands at this path, so that other pages may lead to it."""
    return any(screen.path == path for screen in SCREENS)
