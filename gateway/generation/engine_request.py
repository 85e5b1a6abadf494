"""What a room asks the engine for, in ids; and the forms it takes on its way: to the router, to admission, to a worker.

Pure: knows neither HTTP nor what becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accounting.values.types import Price, Principal
from gateway.generation.models import ServedModel
from gateway.metering.admission import AdmissionRequest
from gateway.routing.router import Prompt
from gateway.structured.form import Form
from gateway.text.choice import TextRules
from workers.protocol.messages import BeamParams, CacheRange, GenerateRequest, Region, SamplingParams, Tier


@dataclass(frozen=True)
class EngineRequest:
    request_id: str
    principal: Principal
    model: ServedModel
    prompt: Sequence[int]
    sampling: SamplingParams
    num_choices: int
    max_tokens: int
    rules: TextRules
    namespace: tuple[Region, ...]
    tier: Tier
    form: Form | None = None
    prompt_logprobs: int = -1
    pinned: bool = False
    """The operator's own: what it computes stays on the worker until it is unpinned."""
    traceparent: str = ""
    batch_id: str | None = None
    line_no: int | None = None
    end_user: str = ""
    num_shown: int | None = None
    """The client sees so many of the choices; None: all."""
    beams: BeamParams | None = None
    """Then the choices are beams, and come by score, at the end."""
    price: Price | None = None
    """Bound by a quote; None: the one in force."""

    @property
    def retention(self) -> tuple[CacheRange, ...]:
        """From tier and key alone: a body cannot ask to be kept."""
        ttl_s = self.principal.cache.ttl_s
        return (CacheRange(ttl_s=ttl_s),) if ttl_s and self.tier == "interactive" else ()

    @property
    def reads_cache(self) -> bool:
        """Logprobs of a prompt need all of it computed."""
        return self.principal.cache.read and self.prompt_logprobs < 0

    def to_route(self) -> Prompt:
        return Prompt(
            self.model.on_workers,
            self.prompt,
            self.namespace,
            adapter=self.model.adapter,
            read=self.reads_cache,
            write=self.principal.cache.write,
        )

    def ask(self, root: str) -> AdmissionRequest:
        return AdmissionRequest(
            request_id=self.request_id,
            principal=self.principal,
            model=self.model.id,
            base=self.model.base,
            root=root,
            tier=self.tier,
            num_prompt_tokens=len(self.prompt),
            max_output_tokens=self.max_tokens * self.num_choices,
            trace_id=self.traceparent[3:35],
            batch_id=self.batch_id,
            line_no=self.line_no,
            end_user=self.end_user,
            price=self.price,
        )

    def to_send(self, root: str, lease_bound: int, lease_seq: int, attempt: int) -> GenerateRequest:
        """To a worker whose cache has this root."""
        cache = self.principal.cache
        return GenerateRequest(
            request_id=self.request_id,
            tenant=self.principal.tenant_id,
            model=self.model.on_workers,
            adapter=self.model.adapter,
            root=root,
            namespace=self.namespace,
            prompt=tuple(self.prompt),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            lease_bound=lease_bound,
            lease_seq=lease_seq,
            attempt=attempt,
            num_choices=self.num_choices,
            tier=self.tier,
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
        )
