"""Rules of a grammar as nodes, which every reader of a notation makes and the writer for workers takes. The module is
pure.

Characters are sets of code points; surrogates are in none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.structured.charset import Ranges

REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
"""How often the part before a mark may stand, at least and at most."""

LARK_ROOT = "%root"
"""The name of the first rule of a grammar in Lark's syntax, where a client's own rule may be called `root`."""


class RulesError(ValueError):
    """The text is no grammar that can be enforced. The message is one sentence without its end."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set. With an empty set nothing matches."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of parts. With no parts it is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


Node = Chars | Sequence | Either | Repeat | Ref
Rules = Mapping[str, Node]


def sequence(parts: list[Node]) -> Node:
    """Returns the parts one after the other; a single part stands for itself."""
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def either(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Either(tuple(parts))


def refs(node: Node) -> Iterator[str]:
    """Yields the name of every rule that the node refers to, as often as it does."""
    match node:
        case Ref(name):
            yield name
        case Sequence(parts) | Either(parts):
            for part in parts:
                yield from refs(part)
        case Repeat(part):
            yield from refs(part)


def endless(rules: Rules) -> str | None:
    """Returns the name of the first rule without any text, or None: an output that entered it could not be ended.

    Takes time in proportion to the number of nodes.
    """
    parents: list[int] = []
    """The node above each node."""
    num_open: list[int] = []
    """The number of parts that each node needs and that are not known to end."""
    users: dict[str, list[int]] = {}
    names: dict[int, str] = {}
    ended: list[int] = []

    def enter(node: Node, parent: int) -> int:
        number, parts, num_needed = len(parents), _needed(node), 0
        match node:
            case Ref(name):
                users.setdefault(name, []).append(number)
                num_needed = 1
            case Either() | Chars(()):
                num_needed = 1
            case Sequence() | Repeat():
                num_needed = len(parts)
        parents.append(parent)
        num_open.append(num_needed)
        if not num_needed:
            ended.append(number)
        for part in parts:
            enter(part, number)
        return number

    for name, body in rules.items():
        names[enter(body, -1)] = name
    ending: set[str] = set()
    while ended:
        number = ended.pop()
        name = names.get(number, "")
        ending.add(name)
        for above in users.get(name, ()) if name else (parents[number],):
            num_open[above] -= 1
            if num_open[above] == 0:
                ended.append(above)
    return next((name for name in rules if name not in ending), None)


def _needed(node: Node) -> tuple[Node, ...]:
    """Returns the parts of a node without those that may be left out."""
    match node:
        case Sequence(parts) | Either(parts):
            return parts
        case Repeat(part, low) if low:
            return (part,)
    return ()
