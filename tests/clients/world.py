"""What a test of clients knows of the running gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fakes import ScriptedRunner
from gateways import MODEL, RunningGateway


@dataclass
class World:
    gateway: RunningGateway
    runner: ScriptedRunner
    home: Path

    @property
    def env(self) -> dict[str, str]:
        """What the snippets read, and a home without anybody's settings."""
        return {
            "HEADGATE_URL": self.gateway.url,
            "HEADGATE_API_KEY": self.gateway.keys.api_key,
            "MODEL": MODEL,
            "EMBEDDING_MODEL": MODEL,
            "HOME": str(self.home),
        }
