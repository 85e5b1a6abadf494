"""The place of headgate.toml. This module loads nothing, because every command looks for the file."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.base.home import HomeError

FILE = "headgate.toml"
CONFIG, CONFIG_NAMES = "HEADGATE_CONFIG", "HEADGATE_CONFIG_NAMES"
"""The path of the file, and the variables that it has set, separated by commas."""


def find(home: Path, working: Path, given: str | None = None) -> Path | None:
    """Returns the file to read: the given one, else that of the home, else that of the working directory, else None.
    Raises `HomeError` for a home that is another user's.
    """
    if given is not None:
        return Path(given).expanduser().absolute()
    if home.is_dir() and not os.access(home, os.X_OK):
        uid = home.stat().st_uid
        raise HomeError(
            f"The home {home} may be used by its owner alone: run the command as that user (`sudo -u '#{uid}' ...`), or"
            " name another home with --home or HEADGATE_HOME."
        )
    return next((path for path in (home / FILE, working / FILE) if path.exists()), None)
