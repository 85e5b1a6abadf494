"""Claude Code and Codex, as npm has them, work in loops of tools; what one turn computed, the next finds in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.installed import command, program, run
from clients.pages import snippets
from clients.script import NUM_CALLS
from clients.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PAGE = snippets()
AGENTS = {"Claude Code": "claude", "Codex": "codex"}
TURNS = "SELECT request_id, cache_read, cache_read + cache_write + uncached FROM ledger_entry WHERE kind = 'settle'"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "only.txt").write_text("text")
    return tmp_path


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_calls_its_shell_and_answers_with_the_result(world: World, agent: str, directory: Path) -> None:
    program(AGENTS[agent])
    done = await run(command(PAGE[agent][0]), world.env, directory)
    assert done.code == 0, done
    assert done.output.strip() == "I see only.txt", done


@pytest.mark.parametrize("agent", AGENTS)
async def test_of_ten_turns_each_finds_all_but_its_own_beginning_in_the_cache(
    world: World, agent: str, directory: Path
) -> None:
    program(AGENTS[agent])
    await world.gateway.settled()
    before = {row[0] for row in await world.gateway.sql(TURNS)}
    task = PAGE[agent][0].text.replace("Which files are here?", "Count with the shell.")
    done = await run(["bash", "-euo", "pipefail", "-c", task], world.env, directory)
    assert done.output.strip() == f"I counted {NUM_CALLS} results.", done
    await world.gateway.settled()
    turns = [row for row in await world.gateway.sql(f"{TURNS} ORDER BY 3") if row[0] not in before]
    assert len(turns) == NUM_CALLS + 1
    shares = [cached / prompt for _, cached, prompt in turns]
    assert min(shares[1:]) >= 0.95, shares
