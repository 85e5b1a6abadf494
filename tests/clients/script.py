"""What the scripted model says to the questions of docs/clients.md, and to those of the agents."""

from __future__ import annotations

import json
from typing import Any

HELLO = "Hello from Headgate."
SUNNY = "It is sunny in Paris."
CITY = {"name": "Paris", "country": "France"}


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def says(prompt: str) -> str:
    if "What is the weather" in prompt:
        return SUNNY if "sunny in" in prompt else call("get_weather", {"city": "Paris"})
    if "Name the capital" in prompt:
        return call("City", CITY) if '"name": "City"' in prompt else json.dumps(CITY)
    return HELLO
