"""Any error of a command becomes one sentence and a status. Nobody sees a traceback who did not ask for one.

It imports no library for this: the code that raised an error of SQLAlchemy has done so.
"""

from __future__ import annotations

import errno
import os
import sys

from gateway.base.home import HomeError
from gateway.cli.exit_codes import CONFIG, FAILED, FAULT

TRACEBACK = "HEADGATE_TRACEBACK"
_REFUSED_CONFIGURATION = ("SettingsError", "SchemaNewer")
"""The names of errors that another start does not mend. Their classes are in modules that the command may not have loaded."""
_REMEDIES = {
    errno.ENOSPC: "Make room on that disk, or name a file on another one.",
    errno.EDQUOT: "Make room within the quota of that disk, or name a file on another one.",
    errno.EACCES: "Run the command as the owner of that file, or name another one.",
    errno.EPERM: "Run the command as the owner of that file, or name another one.",
    errno.EROFS: "The disk is read-only: name a file on another one.",
    errno.ENOENT: "Name a file in a directory that exists.",
    errno.ENOTDIR: "Name a file in a directory that exists.",
    errno.EISDIR: "Name a file, not a directory.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`).",
    errno.ENOMEM: "Free some memory.",
}


def sentence(error: Exception) -> tuple[str, int]:
    """Returns what to tell the operator about an error that no command has caught, and the status to end with."""
    if (told := _of_settings(error) or database_fault(error)) is not None:
        return told, CONFIG if type(error).__name__ in _REFUSED_CONFIGURATION else FAILED
    if isinstance(error, HomeError):
        return str(error), FAILED
    if isinstance(error, OSError) and error.errno is not None:
        return _of_system(error), FAILED
    return (
        f"This is a fault of Headgate: {type(error).__name__}: {_one_line(str(error))}. Please report it, with the output of the"
        f" same command under {TRACEBACK}=1.",
        FAULT,
    )


def wants_traceback() -> bool:
    return bool(os.environ.get(TRACEBACK))


def database_fault(error: Exception) -> str | None:
    """Returns one sentence for an error of accounting or of a database's driver; None for any other error."""
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy.exc import SQLAlchemyError

    from accounting.database.db import first_line
    from accounting.values.errors import AccountingError

    if isinstance(error, AccountingError):
        return str(error)
    if isinstance(error, SQLAlchemyError):
        return (
            f"The database cannot be used now: {first_line(error)}."
            " See that it runs, has room and may be written, or set HEADGATE_DATABASE_URL."
        )
    return None


def _of_settings(error: Exception) -> str | None:
    return str(error) if type(error).__name__ == "SettingsError" else None


def _of_system(error: OSError) -> str:
    what = f"{error.filename}: " if error.filename else ""
    said = (error.strerror or type(error).__name__).rstrip(".")
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{what}{said}. {remedy}".rstrip()


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:300] or "no message"
