"""The program `headgate`. Its imports take a moment, so Ctrl-C may come while they last."""

from __future__ import annotations

import sys

from gateway.cli.exit_codes import INTERRUPTED


def main() -> None:
    try:
        from gateway.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command()


if __name__ == "__main__":
    main()
