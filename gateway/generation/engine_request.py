"""A request to the engine, in token ids, and the forms in which the router, the admission and a worker receive it.
It is pure: it knows neither HTTP nor the outcome.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from accounting.values.types import Price, Principal, RequestFacts
from gateway.generation.served.models import ServedModel
from gateway.metering.admission import AdmissionRequest
from gateway.parsers.parts import MakeParser
from gateway.parsers.plain import PlainText
from gateway.routing.router import Prompt
from gateway.structured.form import Form
from gateway.telemetry.record import Asked
from gateway.text.choice import TextRules
from gateway.text.volatile import VolatilePart
from gateway.upstreams.wires.values import Ask
from workers.protocol.messages import BeamParams, CacheRange, GenerateRequest, PoolingParams, Region, SamplingParams


class EngineRequest(msgspec.Struct, frozen=True):
    facts: RequestFacts
    principal: Principal
    model: ServedModel
    prompt: array[int]
    sampling: SamplingParams
    num_choices: int
    max_tokens: int
    rules: TextRules
    namespace: tuple[Region, ...]
    form: Form | None = None
    make_parser: MakeParser = PlainText
    """Makes the parser of a choice's output."""
    prompt_logprobs: int = -1
    pinned: bool = False
    """The request is the operator's own: the KV it computes stays on the worker until it is unpinned."""
    traceparent: str = ""
    num_shown: int | None = None
    """The number of choices that the client sees. None means all of them."""
    beams: BeamParams | None = None
    """A value other than None makes the choices beams; they come at the end, in the order of their scores."""
    price: Price | None = None
    """The price that a quote has bound. None means the price in force."""
    pooling: PoolingParams | None = None
    """A value other than None asks for vectors or scores instead of tokens. The prompt is all inputs, one after the
    other.
    """
    volatile: Sequence[VolatilePart] = ()
    """The volatile lines of the prompt, which a miss of the cache may be due to."""
    foreign: Ask | None = None
    """The same request as an upstream is asked. None if none can be asked."""
    unasked: str = ""
    """The field that no upstream can be asked for, where one would be asked."""
    is_bought: bool = False
    """An upstream answers it, and no worker of our own."""
    is_whole: bool = False
    """The client reads the answer in one body, and no parser of it ends the output early."""

    @classmethod
    def for_vectors(
        cls,
        facts: RequestFacts,
        principal: Principal,
        model: ServedModel,
        inputs: Sequence[array[int]],
        pooling: PoolingParams,
        namespace: tuple[Region, ...],
        traceparent: str,
    ) -> EngineRequest:
        """Returns a request for a vector or a score of each input."""
        prompt = array("i")
        for one in inputs:
            prompt += one
        nothing = SamplingParams(seed=0)
        return cls(
            facts,
            principal,
            model,
            prompt,
            nothing,
            1,
            0,
            TextRules(),
            namespace,
            traceparent=traceparent,
            pooling=pooling,
        )

    @property
    def retention(self) -> tuple[CacheRange, ...]:
        """The retention depends on tier and key alone: a request body cannot ask to be kept."""
        ttl_s = self.principal.cache.ttl_s
        return (CacheRange(ttl_s=ttl_s),) if ttl_s and self.facts.tier == "interactive" else ()

    @property
    def reads_cache(self) -> bool:
        """The value is False if logprobs of the prompt are wanted, because they need all of it computed."""
        return self.principal.cache.read and self.prompt_logprobs < 0

    @property
    def gathers(self) -> bool:
        """Whether the worker may send several tokens at once: nothing is to be seen in them before the answer's end."""
        plain = self.num_choices == 1 and self.beams is None and self.pooling is None and self.sampling.logprobs < 0
        return self.is_whole and plain and self.rules.stops is None

    def asked(self, num_prompts: int) -> Asked:
        """Returns what telemetry shows of this request, the first of `num_prompts`."""
        sampling = self.sampling
        return Asked(
            num_prompts,
            self.num_choices,
            self.max_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.seed,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            self.form is not None,
        )

    def to_route(self) -> Prompt:
        return Prompt(
            self.model.on_workers,
            self.prompt,
            self.namespace,
            adapter=self.model.adapter,
            read=self.reads_cache,
            write=self.principal.cache.write,
            is_one=self.pooling is None,
            vocabulary=self.model.tokenizer.vocabulary,
        )

    def ask(self) -> AdmissionRequest:
        return AdmissionRequest(
            facts=self.facts,
            principal=self.principal,
            max_output_tokens=self.max_tokens * self.num_choices,
            price=self.price,
            base=self.model.base or ("" if self.facts.model == self.model.id else self.model.id),
        )

    def to_send(self, root: str, lease_bound: int, lease_seq: int) -> GenerateRequest:
        """Returns the message to a worker whose cache has this root."""
        cache = self.principal.cache
        return GenerateRequest(
            request_id=self.facts.request_id,
            tenant=self.facts.tenant_id,
            model=self.model.on_workers,
            adapter=self.model.adapter,
            root=root,
            namespace=self.namespace,
            prompt=self.prompt,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            lease_bound=lease_bound,
            lease_seq=lease_seq,
            num_choices=self.num_choices,
            tier=self.facts.tier,
            weight=self.principal.weight,
            cache_read=self.reads_cache,
            cache_write=cache.write,
            pinned=self.pinned,
            grammar="" if self.form is None else self.form.grammar,
            cache_floor_blocks=cache.floor_blocks,
            cache_quota_blocks=-1 if cache.quota_blocks is None else cache.quota_blocks,
            retention=self.retention,
            traceparent=self.traceparent,
            prompt_logprobs=self.prompt_logprobs,
            beams=self.beams,
            pooling=self.pooling,
            gather=self.gathers,
        )
