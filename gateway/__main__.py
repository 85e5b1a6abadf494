"""`python -m gateway`: one gateway process. What stops its start is one sentence and a non-zero exit."""

from __future__ import annotations

import sys

import uvloop

from gateway import settings
from gateway.cli.supervisor import EXIT_CONFIG
from gateway.server import serve
from gateway.telemetry import logs


def main() -> int:
    try:
        loaded = settings.load()
        logs.configure(loaded.log_level)
        uvloop.run(serve(loaded))
    except settings.SettingsError as error:
        print(f"headgate gateway: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
