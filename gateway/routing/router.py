"""The choice of a worker for a request: links and their caches become candidates, and `placement` decides.

The router owns the expected output of requests, and the assumptions made when a request was sent. The prompt's hashes
are made once per KV identity, from the path that the gateway made of the key, so another tenant's prompt can attract no
request.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from cache.tree.hashing import GROUP_TOKENS, group_hashes
from gateway.base import errors
from gateway.routing.links.cache_view import Group
from gateway.routing.links.link import Link, reads
from gateway.routing.placement import Candidate, Choose, Placement, Reason, Wanted, alone, place
from gateway.routing.prefix_uses import PrefixUses
from workers.protocol.messages import Finished, Region

ASSUMED_AT_LEAST_S = 0.5
"""The shortest time for which a sent prompt is assumed to be cached. A worker reports its cache once a step, and steps
may be slower than predicted.
"""
Resume = Literal["resumed", "failed"]
"""The fate of a request whose worker was lost: another worker went on with it, or none did in time."""
OUTPUT_WEIGHT = 0.05
"""The weight of one request in the moving average of output tokens."""


@dataclass
class Prompt:
    """A prompt as the router sees it."""

    model: str
    tokens: array[int]
    path: tuple[Region, ...]
    adapter: str = ""
    read: bool = True
    write: bool = True
    is_one: bool = True
    """The tokens are one prompt. The value is False for several, one after the other, of which no cache knows a group."""
    vocabulary: str = ""
    """The digest of the vocabulary that the ids are of, or nothing."""
    _groups: dict[tuple[str, bytes, int], list[Group]] = field(default_factory=dict, repr=False)

    def groups(self, key: bytes, root: str, identity: bytes, block_size: int) -> list[Group]:
        """Returns the hashes of the prompt's groups. O(tokens), once for each KV identity. The list is empty for a
        worker that reports nothing of its cache. An adapter's `identity` is appended to each region's id, as the worker
        does.
        """
        known = self._groups.get((root, identity, block_size))
        if known is None:
            known = []
            has_group = len(self.path) > 1 or len(self.tokens) >= GROUP_TOKENS
            if key and has_group and self.is_one and block_size and not GROUP_TOKENS % block_size:
                path = [(region.id + identity, region.end) for region in self.path]
                known = group_hashes(key, root.encode(), path, self.tokens, block_size=block_size)
            self._groups[root, identity, block_size] = known
        return known

    def num_public(self, block_size: int) -> int:
        end = self.path[0].end if len(self.path) > 1 else 0
        return end // block_size * block_size if block_size else 0


class Pick(msgspec.Struct, frozen=True):
    """The chosen worker and the reason. Pass it to `Router.sent` and `Router.ended`."""

    link: Link
    placement: Placement
    prompt: Prompt
    root: str
    """The worker's root when it was chosen."""
    apart: AbstractContextManager[None] = nullcontext()
    """Keeps suspects from the worker until this request, which is one, has been sent to it."""

    @property
    def num_uncached(self) -> int:
        """The number of prompt tokens that the worker is expected to compute."""
        return max(0, len(self.prompt.tokens) - self.placement.num_cached)

    def explained(self, final: Finished) -> Finished:
        """Corrects the miss reason: if another worker had more of the prompt than this one, the router's choice caused
        the miss.
        """
        report = final.cache
        known = report.miss_reason in ("cold", "diverged")
        if not known or self.placement.num_elsewhere <= report.cached_tokens:
            return final
        report = msgspec.structs.replace(report, miss_reason="other_worker", diverged_at_token=-1)
        return msgspec.structs.replace(final, cache=report)


@dataclass
class RouterCounts:
    """Counters that metrics read. Tokens and seconds are sums over all requests that finished. What workers are scaled by
    is kept for each model that a worker has served."""

    choices: dict[tuple[str, Reason], int] = field(default_factory=dict)
    num_predicted_tokens: int = 0
    num_cached_tokens: int = 0
    num_over_tokens: int = 0
    """Tokens that were predicted but not cached."""
    num_under_tokens: int = 0
    """Tokens that were cached but not predicted."""
    predicted_ttft_s: dict[str, float] = field(default_factory=dict)
    ttft_s: dict[str, float] = field(default_factory=dict)
    num_other_worker: int = 0
    resumes: dict[Resume, int] = field(default_factory=lambda: dict.fromkeys(get_args(Resume), 0))


class Router:
    def __init__(
        self, group_key: bytes = b"", *, rule: Choose = place, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """An empty key means that nothing is known of caches."""
        self.counts = RouterCounts()
        self.prefixes = PrefixUses()
        self._key = group_key
        self._rule = rule
        self._clock = clock
        self._turn = 0
        self._num_output = 128.0

    def prepare(self, links: Iterable[Link], prompt: Prompt) -> None:
        """Computes the prompt's hashes, the long part of `choose`. It is safe in a thread."""
        for link in links:
            if _serves(link, prompt):
                self._groups(link, prompt)

    def check(self, links: Collection[Link], prompt: Prompt, avoid: Collection[str] = ()) -> dict[str, Link]:
        """Returns the workers that may take the prompt, by name. Raises `ApiError` 503 when no worker takes work."""
        able = {
            link.registration.worker: link
            for link in links
            if _serves(link, prompt) and link.takes_work and link.registration.worker not in avoid
        }
        if not able:
            raise _refusal(links, prompt)
        return able

    def choose(self, links: Collection[Link], prompt: Prompt, avoid: Collection[str] = ()) -> Pick:
        """Chooses a worker. Raises `ApiError` 503 when no worker takes work. It changes no state; `sent` does."""
        able = self.check(links, prompt, avoid)
        now = self._clock()
        if len(able) == 1 and self._rule is place:
            return self._only(next(iter(able.values())), prompt, now)
        candidates = [self._candidate(link, prompt, now) for link in able.values()]
        placement = self._rule(candidates, self._wanted(able.values(), prompt), self._turn)
        link = able[placement.worker]
        return Pick(link, placement, prompt, link.hello.root if link.hello else "")

    def _only(self, link: Link, prompt: Prompt, now: float) -> Pick:
        """Returns the choice of the only worker, which needs no comparison."""
        candidate = self._candidate(link, prompt, now)
        placement = alone(candidate, len(prompt.tokens), self._num_output)
        return Pick(link, placement, prompt, link.hello.root if link.hello else "")

    def sent(self, pick: Pick) -> None:
        """Notes that a request is being sent. The worker is assumed to have the prompt from now on, until it reports so
        or would have reported it.
        """
        placement, link, prompt = pick.placement, pick.link, pick.prompt
        self._turn += 1
        choices, choice = self.counts.choices, (prompt.model, placement.reason)
        choices[choice] = choices.get(choice, 0) + 1
        if prompt.write:
            now = self._clock()
            until = now + max(ASSUMED_AT_LEAST_S, 2 * placement.ttft_s)
            link.cached.assume(self._groups(link, prompt), until, now)

    def ended(self, pick: Pick, final: Finished) -> None:
        """Counts the prediction against the result."""
        counts, report = self.counts, final.cache
        predicted, real = pick.placement.num_cached, report.cached_tokens
        counts.num_predicted_tokens += predicted
        counts.num_cached_tokens += real
        counts.num_over_tokens += max(0, predicted - real)
        counts.num_under_tokens += max(0, real - predicted)
        counts.num_other_worker += report.miss_reason == "other_worker"
        first_us = next((e.offset_us for e in final.timeline if e.name == "first_token"), None)
        if first_us is not None:
            model = pick.prompt.model
            counts.predicted_ttft_s[model] = counts.predicted_ttft_s.get(model, 0.0) + pick.placement.ttft_s
            counts.ttft_s[model] = counts.ttft_s.get(model, 0.0) + first_us / 1e6
        self._note_prefix(pick, real)
        self._num_output += OUTPUT_WEIGHT * (final.usage.output - self._num_output)

    def _note_prefix(self, pick: Pick, num_cached: int) -> None:
        prompt = pick.prompt
        groups = self._groups(pick.link, prompt)
        if groups:
            is_public = len(prompt.path) > 1
            self.prefixes.note(groups[0][0], prompt.model, len(prompt.tokens), num_cached, is_public=is_public)

    def _candidate(self, link: Link, prompt: Prompt, now: float) -> Candidate:
        status = link.status
        groups = self._groups(link, prompt) if prompt.read else []
        return Candidate(
            worker=link.registration.worker,
            num_cached=link.cached.num_tokens(groups, now),
            num_queued=status.waiting_tokens + link.num_unreported_tokens,
            num_sequences=link.load,
            max_running=link.hello.max_running if link.hello else 0,
            prefill_rate=status.prefill_rate,
            decode_rate=status.decode_rate,
        )

    def _groups(self, link: Link, prompt: Prompt) -> list[Group]:
        if link.hello is None or (prompt.adapter and prompt.adapter not in link.adapters):
            return []  # the worker or the adapter has left meanwhile
        identity = link.adapters[prompt.adapter].identity if prompt.adapter else b""
        return prompt.groups(self._key, link.hello.root, identity, link.hello.block_size)

    def _wanted(self, links: Collection[Link], prompt: Prompt) -> Wanted:
        """Describes the prompt for `place`. The anchor is the first group of the tenant's own part; the hashes of any
        worker serve.
        """
        first = min(links, key=lambda link: link.registration.worker)
        block_size = first.hello.block_size if first.hello else 0
        num_public = prompt.num_public(block_size)
        own = (group for group, end in self._groups(first, prompt) if end > num_public)
        return Wanted(len(prompt.tokens), num_public, next(own, b""), self._num_output)


def _serves(link: Link, prompt: Prompt) -> bool:
    if link.registration.model != prompt.model or not reads(link, prompt.vocabulary):
        return False
    return not prompt.adapter or link.has_adapter(prompt.adapter)


def _refusal(links: Iterable[Link], prompt: Prompt) -> errors.ApiError:
    """Explains why no worker takes work."""
    of_model = [link for link in links if link.registration.model == prompt.model]
    if prompt.adapter and of_model and not any(link.has_adapter(prompt.adapter) for link in of_model):
        return errors.no_worker("No worker has loaded this adapter yet.")
    if any(link.takes_work and not reads(link, prompt.vocabulary) for link in of_model):
        return errors.no_worker(
            "The workers of this model that take work have another tokenizer than the one that this gateway has read."
        )
    if any(link.status.disk_full for link in of_model):
        return errors.disk_full()
    if any(link.status.draining for link in of_model):
        return errors.no_worker("The worker of this model is being drained, and no other serves it.")
    if silent := [link.status.last_step_age_ms / 1000 for link in of_model if not link.takes_work]:
        return errors.no_worker(f"The worker of this model has shown no step for {min(silent):.0f} seconds.")
    return errors.no_worker()
