"""From links and what they told of their caches to a choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from cache.tree.hashing import group_hashes
from gateway.base.errors import ApiError
from gateway.routing.links.cache_view import CacheView
from gateway.routing.router import Prompt, Router
from workers.protocol.counts import TokenUsage
from workers.protocol.messages import CacheEvent, CacheReport, Finished, Hello, Region, TimelineEvent
from workers.protocol.registry import Registration
from workers.protocol.reports import AdapterState, WorkerStatus

KEY, ROOT, SIZE = b"k" * 32, "root", 16
ANNA, BERT, PUBLIC = Region(b"a" * 16), Region(b"b" * 16), Region(b"p" * 16, 128)
TOKENS = tuple(range(300))


STATUS = WorkerStatus(prefill_rate=1000.0, decode_rate=100.0)
HELLO = Hello(1, "p", "m", ROOT, SIZE, 100, 2048, 8)


@dataclass
class Link:
    name: str
    load: int = 0
    takes_work: bool = True
    model: str = "m"
    num_unreported_tokens: int = 0
    status: WorkerStatus = STATUS
    hello: Hello | None = HELLO
    cached: CacheView = field(default_factory=CacheView)
    adapters: dict[str, AdapterState] = field(default_factory=dict)

    def has_adapter(self, name: str) -> bool:
        return name in self.adapters

    @property
    def registration(self) -> Registration:
        return Registration(self.name, "p", "", self.model, "r", 1)

    def holds(self, region: Region, tokens: tuple[int, ...]) -> Link:
        groups = group_hashes(KEY, ROOT.encode(), [(region.id, -1)], tokens, block_size=SIZE)
        self.cached.apply(CacheEvent(0, reset=True, inserted=tuple(g for g, _ in groups)))
        return self


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def prompt(region: Region = ANNA, **more: Any) -> Prompt:
    return Prompt("m", TOKENS, (region,), **more)


def choose(router: Router, *links: Link, prompt: Prompt | None = None, **more: Any) -> str:
    short = Prompt("m", (1, 2, 3), (ANNA,))
    return router.choose(links, prompt or short, **more).link.registration.worker


def test_the_least_loaded_worker_of_the_model_is_chosen() -> None:
    links = Link("a", 5), Link("b", 2), Link("c", 0, model="other"), Link("d", 0, takes_work=False)
    assert choose(Router(), *links) == "b"
    assert choose(Router(), *links, avoid={"b"}) == "a"


def test_a_worker_with_another_vocabulary_gets_no_prompt_and_one_that_says_none_gets_all() -> None:
    other, own = (Link(name, hello=msgspec.structs.replace(HELLO, vocabulary=name)) for name in ("other", "own"))
    wanted = prompt(vocabulary="own")
    assert choose(Router(), other, own, prompt=wanted) == "own"
    assert choose(Router(), other, Link("earlier"), prompt=wanted) == "earlier"
    assert choose(Router(), other, prompt=prompt()) == "other", "a gateway that does not know its own"
    with pytest.raises(ApiError, match="have another tokenizer than the one that this gateway has read"):
        choose(Router(), other, prompt=wanted)


def test_equal_workers_take_turns() -> None:
    router, links = Router(), [Link("a"), Link("b"), Link("c")]
    taken = set()
    for _ in range(3):
        choose(router, *links)  # asked twice, sent once: a quote asks, too
        choice = router.choose(links, Prompt("m", (1, 2, 3), (ANNA,)))
        router.sent(choice)
        taken.add(choice.link.registration.worker)
    assert taken == {"a", "b", "c"}


def test_without_a_worker_it_is_503() -> None:
    with pytest.raises(ApiError) as refusal:
        choose(Router(), Link("a", takes_work=False))
    assert (refusal.value.status, refusal.value.code) == (503, "no_worker")
    assert "retry-after" in refusal.value.headers


def test_who_has_the_prompt_gets_it_and_who_has_anothers_does_not() -> None:
    router = Router(KEY)
    links = [Link(name) for name in "abcd"]
    at_home = choose(router, *links, prompt=prompt())
    other = next(link for link in links if link.name != at_home).holds(BERT, TOKENS)
    assert choose(router, *links, prompt=prompt()) == at_home
    assert choose(router, *links, prompt=prompt(BERT)) == other.name
    other.holds(ANNA, TOKENS)
    assert choose(router, *links, prompt=prompt()) == other.name


def test_the_same_cold_prompt_goes_to_the_same_worker_from_every_gateway() -> None:
    links = [Link(name) for name in "abcdef"]
    assert len({choose(Router(KEY), *links, prompt=prompt()) for _ in range(5)}) == 1
    regions = [Region(bytes([n]) * 16) for n in range(40)]
    spread = {choose(Router(KEY), *links, prompt=prompt(region)) for region in regions}
    assert len(spread) == 6


def test_a_public_beginning_draws_nobody_to_one_worker() -> None:
    links = [Link(name).holds(PUBLIC, TOKENS[:128]) for name in "abcdef"]
    paths = [(PUBLIC, Region(bytes([n]) * 16)) for n in range(40)]
    chosen = [Router(KEY).choose(links, Prompt("m", TOKENS, path)) for path in paths]
    assert {choice.placement.num_cached for choice in chosen} == {128}
    assert {choice.placement.reason for choice in chosen} == {"cold"}
    assert len({choice.link.registration.worker for choice in chosen}) == 6


def test_a_sent_prompt_is_taken_to_be_there_until_the_worker_should_have_said_so() -> None:
    router = Router(KEY, clock=(clock := Clock()))
    links = [Link("a"), Link("b")]
    first = router.choose(links, prompt())
    assert first.placement.num_cached == 0
    router.sent(first)
    again = router.choose(links, prompt())
    assert again.placement.num_cached == 256
    assert again.placement.reason == "affinity"
    clock.now += 2 * first.placement.ttft_s + 0.01
    assert router.choose(links, prompt()).placement.num_cached == 0


def test_what_is_not_to_be_written_is_not_taken_to_be_there() -> None:
    router, links = Router(KEY), [Link("a"), Link("b")]
    router.sent(router.choose(links, prompt(write=False)))
    assert router.choose(links, prompt()).placement.num_cached == 0


def finished(reason: str, cached: int = 0) -> Finished:
    return Finished("r", 0, TokenUsage(output=3), "stop", CacheReport(cached, 0, reason))


def test_a_miss_that_another_worker_would_have_spared_says_so() -> None:
    router = Router(KEY)
    busy = Link("a", load=50).holds(ANNA, TOKENS)
    choice = router.choose([busy, Link("b")], prompt())
    assert (choice.link.registration.worker, choice.placement.reason) == ("b", "bound")
    assert choice.explained(finished("cold")).cache.miss_reason == "other_worker"
    assert choice.explained(finished("diverged", 256)).cache.miss_reason == "diverged"
    assert choice.explained(finished("evicted")).cache.miss_reason == "evicted"


def test_predictions_are_counted_against_what_was() -> None:
    router = Router(KEY)
    link = Link("a").holds(ANNA, TOKENS)
    choice = router.choose([link], prompt())
    router.sent(choice)
    router.ended(choice, finished("", 240))
    counts = router.counts
    assert counts.choices == {(prompt().model, "only"): 1}
    assert (counts.num_predicted_tokens, counts.num_cached_tokens) == (256, 240)
    assert (counts.num_over_tokens, counts.num_under_tokens) == (16, 0)


def test_times_to_the_first_token_and_choices_are_counted_for_each_model() -> None:
    router, links = Router(), [Link("a"), Link("b", model="slow")]
    for model, first_us in (("m", 250_000), ("slow", 9_000_000), ("m", 250_000)):
        choice = router.choose(links, Prompt(model, TOKENS, (ANNA,)))
        router.sent(choice)
        final = msgspec.structs.replace(finished("cold"), timeline=(TimelineEvent("first_token", first_us),))
        router.ended(choice, final)
    counts = router.counts
    assert counts.choices == {("m", "only"): 2, ("slow", "only"): 1}
    assert counts.ttft_s == {"m": 0.5, "slow": 9.0}
    assert counts.predicted_ttft_s["m"] == 2 * counts.predicted_ttft_s["slow"] > 0


def test_only_workers_that_have_the_adapter_are_asked_and_its_kv_is_its_own() -> None:
    router = Router(KEY)
    identity = b"i" * 16
    poets = [Link(name, adapters={"poet": AdapterState("poet", "loaded", identity)}) for name in "bc"]
    links = [Link("a").holds(ANNA, TOKENS), poets[0].holds(ANNA, TOKENS), poets[1]]
    choice = router.choose(links, prompt(adapter="poet"))
    assert choice.link.registration.worker in "bc"
    assert choice.placement.num_cached == choice.placement.num_elsewhere == 0
    poets[1].holds(Region(ANNA.id + identity), TOKENS)
    assert choose(router, *links, prompt=prompt(adapter="poet")) == "c"
    with pytest.raises(ApiError):
        router.choose(links, prompt(adapter="clerk"))
