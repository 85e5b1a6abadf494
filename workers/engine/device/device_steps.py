"""Steps over device rows, as a GPU worker runs them: the host sends differences, sampled tokens are fed back on the
device, and the next step can be launched before the one before it has answered.

It knows a loaded model, plan.py's rows, device rows and graphs. It does not know sequences or who pays. A step of
decode rows alone runs on static buffers, recorded or called; any other one is called with the same kernels.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

import torch

from kernels.arguments.batch import Slots
from kernels.dispatch import TWINS
from workers.engine.device.device_rows import Mirror, RowStore
from workers.engine.device.graph_buffers import StaticBatch
from workers.engine.device.graphs import Bucket, Capture, DirectCall, Graphs, bucket_sizes, equal
from workers.engine.device.mixed_step import MixedStep, MixedTensors, mix
from workers.engine.device.shared_rows import shared_groups
from workers.engine.device.steps import LoadedModel, drawn_from
from workers.engine.device.warm_up import MadeUpRows
from workers.engine.kv.transport import Download, upload
from workers.engine.model import hf
from workers.engine.pooling.pooler import NOTHING, Pending
from workers.engine.sampling.device_edits import DeviceEdits
from workers.engine.sampling.sampler import Logprobs
from workers.engine.values.plan import Row, RowResult, SampledToken, Ticket
from workers.protocol.messages import TokenLogprob

log = logging.getLogger(__name__)

_FORWARD_OPS = ("attention_decode", "input_prep", "kv_write", "rope_kv_write")
_DRAW_OPS = ("advance_rows", "sample")
"""Ops of the two halves of a step. Their twins ask the host for lengths or look into tensors, and neither can be
recorded."""


class Launched:
    """A step that was launched; its tokens are being copied to the host."""

    def __init__(
        self,
        rows: Sequence[Row],
        download: Download,
        logprobs: Logprobs,
        prompts: Sequence[tuple[TokenLogprob, ...]] = (),
        states: Sequence[torch.Tensor | None] = (),
        pooled: Pending = NOTHING,
    ) -> None:
        self._num_draws = [len(row.draws) for row in rows]
        self._download = download
        self._logprobs = logprobs
        self._prompts = prompts or [()] * len(rows)
        self._states = states or [None] * len(rows)
        self._pooled = pooled

    def collect(self) -> list[RowResult]:
        tokens, *found = self._download.wait()
        logprobs = self._logprobs.read(found)
        drawn = [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]
        results, first = [], 0
        pooled = self._pooled.take(len(self._num_draws))
        told = zip(self._num_draws, self._prompts, self._states, pooled, strict=True)
        for number, prompt, states, answer in told:
            probed = states if answer is None else answer
            results.append(RowResult(tuple(drawn[first : first + number]), prompt, probed))
            first += number
        return results


class DeviceSteps:
    lag = 1

    def __init__(
        self,
        loaded: LoadedModel,
        max_rows: int,
        max_model_len: int,
        vocab_size: int,
        *,
        checks: bool = False,
        shared_attention: bool = False,
    ) -> None:
        """Prepares the buffers of the steps. If `checks` is set, each replay is compared with a call. If
        `shared_attention` is set, decode rows that share a long prefix read it once."""
        self._shared_attention = shared_attention
        self._loaded = loaded
        self._reads_lists = loaded.ops.chosen["attention_decode"] is TWINS["attention_decode"]
        self._checks = checks
        self._max_model_len = max_model_len
        self._block_size = loaded.store.shape.block_size
        max_blocks = -(-max_model_len // self._block_size)
        sizes = bucket_sizes(max_rows, loaded.min_tokens)
        self._mirror = Mirror(max_rows, max_blocks)
        self._rows = RowStore(max_rows, max_blocks, loaded.device)
        attention = (loaded.num_heads, loaded.store.shape.head_dim)
        self.static = StaticBatch(
            sizes[-1],
            max_blocks,
            self._block_size,
            vocab_size,
            loaded.device,
            None if self._reads_lists else attention,
            shared_attention,
        )
        self.graphs = Graphs(sizes, self._forward, self._draw)
        self._workspace = loaded.ops.sample_workspace(sizes[-1], vocab_size)
        eos_token_ids = loaded.sampler.eos_token_ids
        self._edits = DeviceEdits(loaded.ops, max_rows, vocab_size, eos_token_ids, loaded.device)
        self._active: array[int] | None = None
        """Device rows of the step that the static buffers hold; the value is None while they hold none."""

    def launch(self, rows: Sequence[Row]) -> Ticket:
        alone = all(len(row.tokens) == len(row.draws) == 1 for row in rows)
        if alone and all(row.prompt_logprobs < 0 and row.probe is None for row in rows):
            return self._launch_decode(rows)
        return self._launch_mixed(rows)

    # --- decode rows alone, on static buffers ---

    def _launch_decode(self, rows: Sequence[Row]) -> Launched:
        bucket = self.graphs.bucket(len(rows))
        row_ids = array("i", [row.row_id for row in rows])
        active = row_ids + array("i", [-1]) * (bucket.size - len(rows))
        self._place(rows, active)
        self._edits.begin(rows)
        if self._shared_attention and (groups := shared_groups(rows, self._block_size)):
            # The shared prefixes differ from step to step, so such a pass cannot be recorded.
            self._loaded.step.context = self.static.shared_context(bucket.size, rows, groups)
            self.graphs.called(bucket.size).forward()
        else:
            self._set_context(bucket.size, [row.start for row in rows])
            self._forward_checked(bucket, len(rows))
        logits = self.static.logits[: len(rows)]
        draws = [row.draws[0] for row in rows]
        logprobs = Logprobs(logits, draws)
        self._edits.apply(logits, rows)
        self._draw_checked(bucket, len(rows))
        self._mirror.advance(row_ids)
        tokens = self.static.drawn[: len(rows)]
        self._edits.count(tokens, rows)
        return Launched(rows, self._download(tokens, logprobs), logprobs)

    def _place(self, rows: Sequence[Row], active: array[int]) -> None:
        """Brings device rows and static buffers up to date."""
        delta = self._mirror.diff(rows)
        others = active != self._active
        parts = upload(self._loaded.device, *delta.parts(), active if others else array("i"))
        self._active = None
        self._rows.apply(*parts[:-1])
        self._mirror.commit(delta)
        if others:
            self.static.active[: len(active)] = parts[-1]
        if others or delta.rows:
            self.static.gather_draws(self._rows.state, len(active))
        self._active = active

    def _forward(self, size: int) -> None:
        loaded, inputs = self._loaded, self.static.inputs(size)
        active = self.static.active[:size]
        loaded.ops.input_prep(inputs, self._rows.rows, active, self._block_size)
        hidden = loaded.hidden_states(inputs.token_ids, inputs.positions)
        loaded.head(hidden, self.static.logits[:size])

    def _draw(self, size: int) -> None:
        static, ops = self.static, self._loaded.ops
        drawn, workspace = static.drawn[:size], self._workspace
        ops.sample(static.logits[:size], static.draws(size), drawn, workspace=workspace)
        ops.advance_rows(self._rows.rows, static.active[:size], drawn)

    def _forward_checked(self, bucket: Bucket, num_rows: int) -> None:
        bucket.forward()
        if self._checks and bucket.recorded:
            logits = self.static.logits[:num_rows]
            found = logits.clone()
            self.graphs.called(bucket.size).forward()
            self._tell_unequal(bucket, "logits", found, logits)

    def _draw_checked(self, bucket: Bucket, num_rows: int) -> None:
        before = self._rows.state.clone() if self._checks else None
        bucket.draw()
        if before is not None and bucket.recorded:
            tokens = self.static.drawn[:num_rows]
            found = tokens.clone()
            self._rows.state.copy_(before)
            self.graphs.called(bucket.size).draw()
            self._tell_unequal(bucket, "tokens", found, tokens)

    def _tell_unequal(self, bucket: Bucket, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not equal([found], [expected]):
            event = {"event": "graph_differs", "num_rows": bucket.size}
            log.error("the recorded step of %d rows has other %s", bucket.size, what, extra=event)

    # --- a step with prefill, several draws or prompt logprobs ---

    def _launch_mixed(self, rows: Sequence[Row]) -> Launched:
        step = mix(rows, self._block_size)
        delta = self._mirror.diff(rows)
        parts = upload(self._loaded.device, *delta.parts(), *step.parts())
        self._active = None
        self._rows.apply(*parts[:4])
        self._mirror.commit(delta)
        tensors = MixedTensors(*parts[4:])
        hidden = self._mixed_pass(step, tensors)
        pooled = self._loaded.pooled(rows, step.starts, hidden)
        if not step.draws:
            nothing = hidden.new_empty(0, dtype=torch.int64)
            logprobs = Logprobs(hidden, ())
            return Launched(rows, Download([nothing]), logprobs, self._prompts(step, hidden), (), pooled)
        logits = self._loaded.head(hidden.index_select(0, tensors.last))
        logprobs = Logprobs(logits, step.draws)
        self._edits.begin(rows)
        self._edits.apply(logits, rows)
        tokens = self._loaded.ops.sample(logits, tensors.draws())
        prompts = self._prompts(step, hidden)
        if step.fed_back:
            places, row_ids = tensors.feeding.view(-1, 2).unbind(1)
            fed_back = tokens.index_select(0, places)
            self._loaded.ops.advance_rows(self._rows.rows, row_ids.contiguous(), fed_back)
            self._mirror.advance(step.fed_back)
        self._edits.count(tokens, rows)
        starts = zip(rows, step.starts, strict=True)
        states = [drawn_from(row, start, hidden) for row, start in starts]
        return Launched(rows, self._download(tokens, logprobs), logprobs, prompts, states, pooled)

    def _mixed_pass(self, step: MixedStep, tensors: MixedTensors) -> torch.Tensor:
        loaded, number = self._loaded, len(step.decode)
        token_ids, positions = tensors.tokens.long(), tensors.positions.long()
        slots, decode = tensors.slots.long(), None
        if number:
            inputs = self.static.inputs(number)
            loaded.ops.input_prep(inputs, self._rows.rows, tensors.active, self._block_size)
            token_ids = torch.cat((inputs.token_ids, token_ids))
            positions = torch.cat((inputs.positions, positions))
            slots = torch.cat((inputs.slots, slots))
            decode = self.static.decode_batch([row.start for row in step.decode])
        chunks = tensors.chunks(step, self._rows.rows)
        trees = tensors.trees(step, self._rows.rows)
        where = Slots(slots, self._block_size)
        loaded.step.context = hf.StepContext(where, decode, chunks, trees)
        if (missing := loaded.min_tokens - step.num_tokens) > 0:
            token_ids = torch.nn.functional.pad(token_ids, (0, missing))
            positions = torch.nn.functional.pad(positions, (0, missing))
        return loaded.hidden_states(token_ids, positions)

    def _prompts(self, step: MixedStep, hidden: torch.Tensor) -> list[tuple[TokenLogprob, ...]]:
        return [
            self._loaded.prompt_logprobs(row, start, hidden) for row, start in zip(step.rows, step.starts, strict=True)
        ]

    # --- both kinds of step ---

    def _download(self, tokens: torch.Tensor, logprobs: Logprobs) -> Download:
        return Download([tokens, *logprobs.of(tokens)])

    # --- before the first step ---

    def record(self, capture: Capture) -> None:
        """Records every size that can be recorded and compares each recording with its call. A half of the step with an
        op that needs the host is called instead."""
        forward, draw = (self._recordable(ops) for ops in (_FORWARD_OPS, _DRAW_OPS))
        direct = DirectCall()
        self.graphs.record(capture if forward else direct, capture if draw else direct, self._made_up())
        self.forget()

    def try_decode(self) -> None:
        self._made_up().outcome(self.graphs.called(self.graphs.sizes[-1]))

    def forget(self) -> None:
        self._mirror = Mirror(self._mirror.max_rows, self._mirror.max_blocks)
        self._rows.clear()
        self._active = None

    def _made_up(self) -> MadeUpRows:
        return MadeUpRows(
            self._rows,
            self.static,
            self._loaded.store,
            self._max_model_len - 1,
            self.static.logits.shape[1],
            self._set_context,
        )

    def _set_context(self, size: int, context_lens: Sequence[int]) -> None:
        lens = context_lens if self._reads_lists else None
        self._loaded.step.context = self.static.context(size, lens)

    def _recordable(self, names: Sequence[str]) -> bool:
        twins = [name for name in names if self._loaded.ops.chosen[name] is TWINS[name]]
        if twins and self._loaded.device.type == "cuda":
            log.warning("not recorded, as these run as their twins: %s", ", ".join(twins))
        return not twins or self._loaded.device.type == "cpu"
