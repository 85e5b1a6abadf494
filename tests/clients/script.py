"""What the scripted model says to the questions of docs/clients.md, and to those of the agents."""

from __future__ import annotations

import json
from typing import Any

HELLO = "Hello from Headgate."
SUNNY = "It is sunny in Paris."
CITY = {"name": "Paris", "country": "France"}
NUM_CALLS = 9
RESULT = "<tool_response>\n"


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def says(prompt: str) -> str:
    if "What is the weather" in prompt or "What's the weather" in prompt:
        return SUNNY if "sunny in" in prompt else call("get_weather", {"city": "Paris"})
    if "Name the capital" in prompt:
        return call("City", CITY) if '"name": "City"' in prompt else json.dumps(CITY)
    if "Which files are here?" in prompt:
        return f"I see {_last_result(prompt)}" if RESULT in prompt else _shell(prompt, "ls")
    if "Count with the shell" in prompt:
        count = prompt.count(RESULT)
        return f"I counted {count} results." if count == NUM_CALLS else _shell(prompt, f"echo {count}")
    if prompt.endswith(("The sun is warm", " a qqq")):
        return ""  # the end token follows what lm-eval scores
    return HELLO


def _shell(prompt: str, command: str) -> str:
    """A call of the shell that this agent offers: Claude Code's or Codex's."""
    if '"name": "Bash"' in prompt:
        return call("Bash", {"command": command, "description": "It is what the user wants."})
    return call("exec_command", {"cmd": command})


def _last_result(prompt: str) -> str:
    lines = prompt.rpartition(RESULT)[2].partition("\n</tool_response>")[0].splitlines()
    return lines[-1]
