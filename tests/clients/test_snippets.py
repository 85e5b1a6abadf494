"""Every snippet of docs/clients.md runs unchanged, with the unmodified client that it is about, and prints what it should."""

from __future__ import annotations

import pytest

from clients.installed import command, run
from clients.pages import snippets
from clients.script import HELLO, SUNNY
from clients.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(200)]

PAGE = snippets()
PRINTED = {
    "openai for Python": [HELLO, HELLO],
    "openai for Python: a WebSocket": [HELLO],
    "openai for Python: lanes of a WebSocket": [HELLO, HELLO],
    "openai for Node: chat and streams": [HELLO, HELLO],
    "openai for Node: tools and parsed answers": [SUNNY, "Paris"],
    "openai for Node: responses": [HELLO, f"{HELLO} true"],
    "openai for Node: embeddings": ["2 true"],
    "openai for Node: files and batches": [f"completed {HELLO}"],
    "Vercel AI SDK": [f"{HELLO} true", f"{SUNNY} 2", "Paris", "true"],
    "LangChain": [HELLO, HELLO, SUNNY, SUNNY, "Paris", "2"],
    "LlamaIndex": [HELLO, HELLO, "sunny in Paris", "Paris", "2"],
    "Pydantic AI": [SUNNY, SUNNY, SUNNY, "Paris"],
    "Instructor": ["Paris", "Paris"],
    "LiteLLM": [HELLO, HELLO, HELLO, "2"],
    "llm": [HELLO, '{"name": "Paris", "country": "France"}', SUNNY],
}
"""The lines that each snippet prints."""
ELSEWHERE = {"Claude Code", "Codex", "guidellm", "lm-eval"}
"""Snippets that the other modules of this folder run."""
WITH_OPENAI_2 = ("Instructor", "LiteLLM", "LlamaIndex")


async def test_every_snippet_of_the_page_has_its_lines_here() -> None:
    assert set(PRINTED) | ELSEWHERE == set(PAGE)


@pytest.mark.parametrize("heading", PRINTED)
async def test_a_snippet_prints_what_it_should(world: World, heading: str) -> None:
    snippet = PAGE[heading][0]
    done = await run(command(snippet, 2 if heading in WITH_OPENAI_2 else 3), world.env)
    assert done.code == 0, done
    assert done.output.splitlines() == PRINTED[heading], done
