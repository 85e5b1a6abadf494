"""The facts of an answer's prompts and of the usage so far: the writer is told of them once the first pieces are there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from gateway.generation.reply import AnswerPlan
from gateway.generation.stream import GenerationGroup
from gateway.generation.writer import Ending
from gateway.schema.sampling import SamplingFields
from gateway.writers.chunks import ChunkWriter
from gateway.writers.prompts import scored

Hook = Callable[[GenerationGroup, Sequence[int]], Awaitable[None]]


class PromptFacts:
    """Hands `put` the fields of prompts, by their numbers: their token ids and their logprobs, as far as they were asked for."""

    def __init__(self, plan: AnswerPlan, writer: ChunkWriter, put: Callable[[dict[int, dict[str, Any]]], None]) -> None:
        self._plan = plan
        self._writer = writer
        self._put = put

    @staticmethod
    def are_wanted(fields: SamplingFields) -> bool:
        return bool(fields.return_token_ids) or fields.prompt_logprobs is not None or fields.continuous_usage

    async def __call__(self, run: GenerationGroup, numbers: Sequence[int]) -> None:
        fields, orders = self._plan.fields, self._plan.orders
        if fields.continuous_usage:
            self._writer.ending_so_far = lambda: Ending(run.usage, run.num_reasoning, {})
        found: dict[int, dict[str, Any]] = {number: {} for number in numbers}
        for number, one in found.items():
            order = orders[number]
            if fields.return_token_ids:
                one["prompt_token_ids"] = order.prompt.tolist()
            if fields.prompt_logprobs is not None:
                work = partial(
                    scored,
                    order.model.tokenizer,
                    order.prompt,
                    run.generations[number].prompt_logprobs,
                    fields.prompt_logprobs,
                    names_ids=bool(fields.return_tokens_as_token_ids),
                )
                one["prompt_logprobs"] = await self._plan.work((1 + fields.prompt_logprobs) * len(order.prompt), work)
        self._put(found)


def in_turn(*hooks: Hook | None) -> Hook | None:
    """Returns one hook that calls the given ones in turn, or None if there are none."""
    given = [hook for hook in hooks if hook is not None]

    async def call(run: GenerationGroup, numbers: Sequence[int]) -> None:
        for hook in given:
            await hook(run, numbers)

    return call if given else None
