"""The list of screens: label, path, the group in which they stand and the roles that see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


SCREENS = (
    ScreenLink("Home", "", "Overview"),
    ScreenLink("Requests", "/requests", "Traffic"),
    ScreenLink("Sessions", "/sessions", "Traffic"),
    ScreenLink("Batches", "/batches", "Traffic"),
    ScreenLink("Playground", "/playground", "Traffic", frozenset(("admin",))),
    ScreenLink("Usage", "/usage", "Money"),
    ScreenLink("Invoices", "/invoices", "Money"),
    ScreenLink("Prices", "/prices", "Money", OPERATORS),
    ScreenLink("Anomalies", "/anomalies", "Money"),
    ScreenLink("Tenants", "/tenants", "Access", OPERATORS),
    ScreenLink("Keys", "/keys", "Access", OPERATORS | {"admin"}),
    ScreenLink("Limits", "/limits", "Access", TENANTS),
    ScreenLink("Audit log", "/audit", "Access", OPERATORS),
    ScreenLink("Workers", "/workers", "Operation", OPERATORS),
    ScreenLink("Cache", "/cache", "Operation", OPERATORS),
    ScreenLink("Fairness", "/fairness", "Operation", OPERATORS),
    ScreenLink("Books", "/books", "Operation", OPERATORS),
    ScreenLink("Webhooks", "/webhooks", "Operation", OPERATORS | {"admin"}),
    ScreenLink("Doctor", "/doctor", "Operation", frozenset(("operator",))),
)


def screens_of(role: Role) -> Sequence[ScreenLink]:
    return [screen for screen in SCREENS if role in screen.roles]


def menu_of(role: Role) -> Mapping[str, Sequence[ScreenLink]]:
    """Returns the screens by their groups, in the order in which they stand."""
    groups: dict[str, list[ScreenLink]] = {}
    for screen in screens_of(role):
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
