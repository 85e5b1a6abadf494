"""Writes docs/errors.md from the code: every error that a client can get, with its status, its code and its words.

The source is read and not run. A call of `ApiError`, or of one of the helpers of `gateway/base/errors.py`, is an error if
its code is written in it. `make errors` writes the page; a test fails when it is not current.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
ERRORS = ROOT / "gateway" / "base" / "errors.py"
BEGIN = "<!-- errors: begin (made by `make errors`) -->"
END = "<!-- errors: end -->"
AFTER = {408, 429, 500, 503}
"""Statuses after which the same request may succeed."""
AGAIN = {"idempotency_in_progress": "later", "request_quarantined": "no"}
"""Codes of which their status does not say whether the same request may succeed."""


class Helper(NamedTuple):
    """How a function makes an error: its status, and where its message and code stand."""

    status: int
    message: int | None
    code: int | None
    default: str | None
    fixed: str | None = None
    """The message, if the function has it itself."""


class Error(NamedTuple):
    status: int
    code: str
    message: str


def helpers() -> dict[str, Helper]:
    """Returns the functions of `gateway/base/errors.py` that return an ApiError with a status of their own."""
    found: dict[str, Helper] = {}
    for function in ast.parse(ERRORS.read_text()).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [argument.arg for argument in function.args.args]
        defaults = dict(zip(reversed(names), (_text(one) for one in reversed(function.args.defaults)), strict=False))
        for call in ast.walk(function):
            made = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "ApiError"
            if not made or not isinstance(call, ast.Call) or not isinstance(call.args[0], ast.Constant):
                continue
            code = next((word.value for word in call.keywords if word.arg == "code"), None)
            is_given = isinstance(code, ast.Name) and code.id in names
            own = None if is_given or code is None else _text(code)
            fixed = _text(call.args[1])
            place = names.index("message") if "message" in names else None
            found[function.name] = Helper(
                int(str(call.args[0].value)),
                place,
                names.index("code") if is_given else None,
                own or defaults.get("code"),
                fixed if place is None else defaults.get("message"),
            )
    return found


@cache
def errors() -> list[Error]:
    """Returns every error of the gateway, by status and code, with the shortest of its messages."""
    known = helpers()
    found: dict[tuple[int, str], str] = {}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for one in _of(ast.parse(path.read_text()), known):
            before = found.get((one.status, one.code))
            if before is None or (one.message and (not before or len(one.message) < len(before))):
                found[one.status, one.code] = one.message
    return [Error(status, code, message) for (status, code), message in sorted(found.items())]


def _of(tree: ast.Module, known: dict[str, Helper]) -> Iterator[Error]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        words = {word.arg: word.value for word in call.keywords}
        if name == "ApiError" and call.args and isinstance(call.args[0], ast.Constant):
            helper = Helper(int(str(call.args[0].value)), 1, None, None)
        elif name in known:
            helper = known[name]
        else:
            continue
        code = words.get("code") or _argument(call, helper.code)
        told = _text(code) if code is not None else helper.default
        message = words.get("message") or _argument(call, helper.message)
        if told:
            yield Error(helper.status, told, (_text(message) if message is not None else None) or helper.fixed or "")


def _argument(call: ast.Call, place: int | None) -> ast.expr | None:
    return call.args[place] if place is not None and place < len(call.args) else None


def _text(value: ast.expr) -> str | None:
    """Returns a text that is written in the code; a part that is known only at run time is an ellipsis."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in value.values]
        return "".join(parts)
    return None


def table() -> str:
    lines = ["| status | code | says, for example | the same request again |", "|---|---|---|---|"]
    for one in errors():
        message = one.message.replace("|", "\\|").replace("<", "&lt;")
        again = AGAIN.get(one.code, "later" if one.status in AFTER else "no")
        lines.append(f"| {one.status} | `{one.code}` | {message} | {again} |")
    return "\n".join(lines)


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
