"""The compliance runner of Open Responses (github.com/openresponses/openresponses), from a copy of its repository that
`HEADGATE_TEST_OPEN_RESPONSES` names. It is not in any registry, and none of it is in this repository.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from clients.installed import run
from clients.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

COPY = os.environ.get("HEADGATE_TEST_OPEN_RESPONSES", "")
ARGUED = {"image-input": "images are refused by name: the served models read text (docs/responses.md)"}


@pytest.mark.skipif(not COPY, reason="HEADGATE_TEST_OPEN_RESPONSES names no copy of openresponses/openresponses")
async def test_the_compliance_runner_passes_all_but_what_is_argued(world: World) -> None:
    bun = shutil.which("bun")
    assert bun is not None, "the runner needs bun, which npm has, and zod 3 in the copy's node_modules"
    env = world.env | {"OPENRESPONSES_API_KEY": world.gateway.keys.api_key}
    arguments = ["run", "bin/compliance-test.ts", "--json", "--base-url", f"{world.gateway.url}/v1", "--model"]
    done = await run([bun, *arguments, env["MODEL"]], env, Path(COPY))
    results = json.loads(done.output)["results"]
    failed = {result["id"]: result["errors"] for result in results if result["status"] != "passed"}
    assert len(results) >= 17, done
    assert set(failed) == set(ARGUED), failed
