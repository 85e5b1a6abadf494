"""The way of a GPU worker, on a CPU: device rows, static buffers, tokens fed back, one step launched before the one
before it is collected. It draws the tokens that the plain way draws, whatever the schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from row_schedules import MAX_ROWS, NUM_TOKENS, PARAMS, LaggedEngine, Running, sequences_of
from tiny_models import Driven, TinyModel, drive

from workers.engine.device import device_steps, graphs, shared_rows
from workers.engine.device.graphs import DirectCall, Launch
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.plan import PENDING, GraphState, Row, SampledToken, SampleSpec
from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.rest

TinyModels = Callable[[str], TinyModel]


def device_runner(model: TinyModel, capture: graphs.Capture | None = None, **settings: object) -> ModelRunner:
    given = {"num_blocks": 64, "block_size": 4, "device": "cpu", "steps": "device"}
    told = RunnerSettings(str(model.directory), **given | {"max_rows": MAX_ROWS} | settings)
    return ModelRunner(told, capture=capture or DirectCall())


def plain_outputs(model: TinyModel, sequences: Sequence[Running]) -> list[list[SampledToken]]:
    expected = []
    for sequence in sequences:
        alone = Driven(sequence.prompt, sequence.params)
        drive(model.runner(), [alone], NUM_TOKENS)
        expected.append(alone.drawn)
    return expected


def assert_same(sequences: Sequence[Running], expected: Sequence[Sequence[SampledToken]]) -> None:
    for sequence, drawn in zip(sequences, expected, strict=True):
        assert [d.token for d in sequence.drawn] == [d.token for d in drawn]
        for mine, theirs in zip(sequence.drawn, drawn, strict=True):
            assert (mine.logprob is None) == (theirs.logprob is None)
            if mine.logprob is not None and theirs.logprob is not None:
                assert mine.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)
                assert [t.token for t in mine.logprob.top] == [t.token for t in theirs.logprob.top]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_tokens_are_those_of_the_plain_way_for_every_schedule(tiny_model: TinyModels, name: str, lag: int) -> None:
    model = tiny_model(name)
    expected = plain_outputs(model, sequences_of(9))
    runner = device_runner(model)
    for seed in range(6):  # on one runner: device rows are full of what the schedule before left there
        sequences = sequences_of(9)
        LaggedEngine(runner, sequences, seed, lag).run()
        assert_same(sequences, expected)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt_oss", "cohere"])
def test_every_kind_of_model_takes_the_way(tiny_model: TinyModels, name: str) -> None:
    model = tiny_model(name)
    sequences = sequences_of(5)
    LaggedEngine(device_runner(model), sequences, 1, 1).run()
    assert_same(sequences, plain_outputs(model, sequences_of(5)))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kv_in_8_bits_takes_the_way(tiny_model: TinyModels, kv_dtype: str) -> None:
    model = tiny_model("qwen3")
    sequences, expected = sequences_of(5), []
    LaggedEngine(device_runner(model, kv_dtype=kv_dtype), sequences, 1, 1).run()
    for sequence in sequences_of(5):
        alone = Driven(sequence.prompt, sequence.params)
        drive(model.runner(kv_dtype=kv_dtype), [alone], NUM_TOKENS)
        expected.append(alone.drawn)
    assert [[d.token for d in s.drawn] for s in sequences] == [[d.token for d in drawn] for drawn in expected]


def test_choices_forked_from_one_row_are_drawn_as_the_plain_way_draws_them(tiny_model: TinyModels) -> None:
    model = tiny_model("llama")
    prompt, table = list(range(20, 31)), [5, 9, 2]
    draws = tuple(SampleSpec(SamplingParams(seed=s, logprobs=2), s, len(prompt), prompt, ()) for s in (3, 4, 5))
    row = Row(prompt, 0, table, draws, prompt_logprobs=1, row_id=2)
    other = Row([7], 0, [11], (SampleSpec(PARAMS[0], 0, 1, [7], ()),), row_id=0)
    mine = device_runner(model).execute([row, other])
    theirs = model.runner().execute([row, other])
    assert [[d.token for d in r.drawn] for r in mine] == [[d.token for d in r.drawn] for r in theirs]
    assert len(mine[0].prompt_logprobs) == len(prompt) - 1
    for a, b in zip(mine[0].prompt_logprobs, theirs[0].prompt_logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


def test_results_are_those_of_the_launch_though_the_next_step_ran_over_the_buffers(tiny_model: TinyModels) -> None:
    runner = device_runner(tiny_model("llama"))
    prompt, table = [4, 5, 6], [1, 2]
    draw = SampleSpec(PARAMS[0], 0, 3, prompt, ())
    first = runner.launch([Row(prompt, 0, table, (draw,), row_id=0)])
    tickets = [first]
    for position in (3, 4, 5):
        draw = SampleSpec(PARAMS[0], 0, position + 1, prompt, ())
        tickets.append(runner.launch([Row([PENDING], position, table, (draw,), row_id=0)]))
    drawn = [ticket.collect()[0].drawn[0].token for ticket in tickets]
    alone = Driven(prompt)
    drive(tiny_model("llama").runner(), [alone], 4)
    assert drawn == alone.output


def test_a_step_that_does_not_fit_leaves_no_trace(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each part of a launch in turn; the same rows are launched again, pending tokens and all."""
    model = tiny_model("llama")
    runner = device_runner(model)
    expected = Driven([4, 5, 6, 7], PARAMS[1])
    drive(model.runner(), [expected], 8)
    output: list[int] = []
    table = [3, 1, 2]
    draw = SampleSpec(PARAMS[1], PARAMS[1].seed, 4, [4, 5, 6, 7], ())
    ticket = runner.launch([Row([4, 5, 6, 7], 0, table, (draw,), row_id=1)])
    parts = ("upload", "Logprobs", "DeviceEdits.apply")
    for position in range(4, 11):
        draw = SampleSpec(PARAMS[1], PARAMS[1].seed, position + 1, [4, 5, 6, 7], list(output))
        row = Row([PENDING], position, table, (draw,), row_id=1)
        with monkeypatch.context() as patch:
            patch.setattr(f"workers.engine.device.device_steps.{parts[position % 3]}", _no_memory)
            with pytest.raises(DeviceOutOfMemory, match="tried to allocate"):
                runner.launch([row])
        following = runner.launch([row])
        output.append(ticket.collect()[0].drawn[0].token)
        ticket = following
    output.append(ticket.collect()[0].drawn[0].token)
    assert output == expected.output


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory, tried to allocate\nsomething large")


class Corrupting:
    """A capture whose passes, once they are spoiled, raise one logit behind the launch."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.spoiled: ModelRunner | None = None

    def __call__(self, launch: Launch) -> Launch:
        self.num_captures += 1
        if self.num_captures % 2 == 0:
            return launch  # of a pass and its draw the draw comes second

        def replay() -> None:
            launch()
            if self.spoiled is not None:
                self.spoiled._steps.static.logits[0, 9] += 50.0

        return replay


def test_a_recorded_step_that_differs_is_called_and_said(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    off = _OffByOne()
    with caplog.at_level(logging.INFO, "workers.engine.device.graphs"):
        runner = device_runner(tiny_model("llama"), off)
    sizes = [size for size in (6, 4, 2, 1) if size >= runner.loaded.min_tokens]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"steps of {size} rows are called: their recording gives other bits" for size in sizes
    ]
    assert f"0 of {len(sizes)} decode steps recorded" in caplog.text
    assert list(runner.graphs) == [GraphState(size, "differs") for size in reversed(sizes)]
    sequences = sequences_of(4)
    LaggedEngine(runner, sequences, 3, 1).run()
    assert_same(sequences, plain_outputs(tiny_model("llama"), sequences_of(4)))


class _OffByOne:
    """A capture that replays a launch twice: tokens are counted twice on the device."""

    def __call__(self, launch: Launch) -> Launch:
        def replay() -> None:
            launch()
            launch()

        return replay


def test_a_step_that_cannot_be_recorded_is_called_and_said(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Launch) -> Launch:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with caplog.at_level(logging.INFO, "workers.engine.device.graphs"):
        runner = device_runner(tiny_model("llama"), refuse)
    assert "that of 6 rows fails: operation not permitted when stream is capturing" in caplog.text
    assert {one.state for one in runner.graphs} == {"failed"}
    sequences = sequences_of(3)
    LaggedEngine(runner, sequences, 3, 1).run()
    assert_same(sequences, plain_outputs(tiny_model("llama"), sequences_of(3)))


def test_with_checks_every_replay_is_compared_with_a_call(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    """The recordings are right at start and wrong later; the tokens served are those of the calls."""
    capture = Corrupting()
    runner = device_runner(tiny_model("llama"), capture, graphs="check")
    sequences = sequences_of(4)
    LaggedEngine(runner, sequences, 3, 1).run()
    assert "has other" not in caplog.text
    capture.spoiled = runner
    sequences = sequences_of(4)
    LaggedEngine(runner, sequences, 3, 1).run()
    assert "the recorded step of 4 rows has other logits" in caplog.text
    assert_same(sequences, plain_outputs(tiny_model("llama"), sequences_of(4)))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_that_read_a_common_prefix_once_draw_the_same_tokens(
    tiny_model: TinyModels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers with a window of gemma2 go on as before."""
    model = tiny_model(name)
    used: list[int] = []

    def few(rows: Sequence[Row], block_size: int) -> list[shared_rows.Group]:
        groups = shared_rows.shared_groups(rows, block_size, lambda _, number: number >= 2)
        used.append(len(groups))
        return groups

    monkeypatch.setattr(device_steps, "shared_groups", few)
    # The same blocks in every table, as rows that hit one prefix node have them.
    prefix = list(range(1, 5))

    def decode(shared_attention: bool) -> list[list[int]]:
        runner = device_runner(model, shared_attention=shared_attention)
        if shared_attention:
            used.clear()  # of the trial before anything is served
        tokens = [(7 * n) % 90 + 3 for n in range(16)]
        runner.execute([Row(tokens, 0, prefix, row_id=0)])
        ends = [[n + 20] for n in range(4)]
        for _ in range(6):
            position = len(tokens) + len(ends[0]) - 1
            rows = [
                Row(
                    [ends[n][-1]],
                    position,
                    [*prefix, 10 + 2 * n, 11 + 2 * n],
                    (SampleSpec(SamplingParams(seed=n, temperature=0.0), n, position + 1, tokens, ()),),
                    row_id=n,
                )
                for n in range(4)
            ]
            for n, result in enumerate(runner.execute(rows)):
                ends[n].append(result.drawn[0].token)
        return ends

    assert decode(shared_attention=True) == decode(shared_attention=False)
    assert used == [1] * 6
