"""Drawing a token per row, and the edits before it, at the vocabulary of a model of today."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch
from kernels.arguments.draws import NO_TOKEN, DrawTensors, EditTensors, num_words
from kernels.reference.sample import PURPOSE_SAMPLE, dense_noise

_VOCAB = 151_936
_ROTATED_BYTES = 256 << 20
_KINDS = {
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.8, 0, 1.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9),
    "top-p 0.95": (0.8, 0, 0.95),
}
"""Temperature, top-k, top-p."""


def cases(tiny: bool) -> Iterator[Case]:
    vocab = 300 if tiny else _VOCAB
    for rows in (2,) if tiny else (1, 8, 64, 128, 256):
        for kind in _KINDS:
            if rows in {2, 128} or kind == "top-k 50, top-p 0.9":
                yield Case(
                    "sample",
                    f"rows {rows}, vocabulary {vocab}, {kind}",
                    lambda device, r=rows, k=kind: _prepare(device, r, vocab, k, tiny),
                    in_graph=True,
                    bar="14" if rows == 128 and kind == "top-k 50, top-p 0.9" else "",
                )
    rows = 2 if tiny else 128
    for used in (False, True):
        yield Case(
            "logits",
            f"rows {rows}, vocabulary {vocab}, {'all edits' if used else 'none used'}",
            lambda device, u=used: _prepare_edits(device, rows, vocab, u, tiny),
            in_graph=True,
        )
    yield Case("verify", f"rows {rows}, 7 proposals", lambda d: _prepare_verify(d, rows), True)


def _draws(device: torch.device, rows: int, kind: str) -> DrawTensors:
    temperature, top_k, top_p = _KINDS[kind]
    return DrawTensors(
        temperature=torch.full((rows,), temperature, device=device),
        top_k=torch.full((rows,), top_k, device=device),
        top_p=torch.full((rows,), top_p, device=device),
        min_p=torch.zeros(rows, device=device),
        seeds=torch.randint(0, 2**32, (rows, 2), device=device),
        positions=torch.arange(rows, device=device),
    )


def _peaked(device: torch.device, *shape: int) -> torch.Tensor:
    """Logits with the heavy head of a language model: the r-th largest probability falls about as 1 / r ** 1.5."""
    ranks = torch.rand(shape, device=device).argsort(dim=-1) + 1.0
    return 12.0 - 1.5 * ranks.log() + 0.3 * torch.randn(shape, device=device)


def _logits(device: torch.device, rows: int, vocab: int, tiny: bool) -> torch.Tensor:
    num_sets = 2 if tiny else min(16, max(2, _ROTATED_BYTES // (rows * vocab * 4)))
    return torch.stack([_peaked(device, rows, vocab) for _ in range(num_sets)])


def _prepare(device: torch.device, rows: int, vocab: int, kind: str, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    logits, draws = _logits(device, rows, vocab, tiny), _draws(device, rows, kind)
    workspace = ops.sample_workspace(rows, vocab)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    turn = itertools.cycle(range(len(logits)))

    def run() -> None:
        ops.sample(logits[next(turn)], draws, tokens, workspace=workspace)

    def error() -> float:
        tokens.fill_(-1)
        ops.sample(logits[0], draws, tokens, workspace=workspace)
        return _share_not_drawable(logits[0], draws, tokens, kind)

    def sorting() -> None:
        _sorted_draw(logits[next(turn)], draws, kind)

    def multinomial() -> None:
        scaled = logits[next(turn)] / max(_KINDS[kind][0], 1e-6)
        torch.multinomial(scaled.softmax(dim=-1), 1)

    def flashinfer() -> None:
        _flashinfer_draw(logits[next(turn)], kind)

    peers: dict[str, Callable[[], None]] = {"flashinfer": flashinfer}
    if kind == "greedy":
        peers = {"torch argmax": lambda: (logits[next(turn)].argmax(dim=-1), None)[1]}
    elif kind == "temperature":
        peers |= {"torch softmax, multinomial": multinomial}
    else:
        peers |= {"torch sort": sorting}
    return Prepared(run, error, 0.0, rows * vocab * 4, peers=peers)


def _share_not_drawable(logits: torch.Tensor, draws: DrawTensors, tokens: torch.Tensor, kind: str) -> float:
    """Returns the share of rows whose token is not within 1e-4 of the best noisy one of what a sort in float64
    keeps."""
    temperature, top_k, top_p = _KINDS[kind]
    if temperature == 0.0:
        return float((logits.gather(1, tokens[:, None])[:, 0] != logits.amax(1)).float().mean())
    scaled = (logits / temperature).double()
    falling, order = scaled.sort(dim=-1, descending=True)
    if top_k:
        falling = falling.masked_fill(falling < falling[:, top_k - 1 : top_k], -torch.inf)
    probs = falling.softmax(dim=-1)
    falling = falling.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, -torch.inf)
    noise = dense_noise(draws, logits.shape[1], PURPOSE_SAMPLE)
    scores = falling - noise.gather(1, order)
    own = (scaled - noise).gather(1, tokens[:, None])[:, 0]
    return float(((scores.amax(dim=-1) - own).abs() > 1e-4).float().mean())


def _sorted_draw(logits: torch.Tensor, draws: DrawTensors, kind: str) -> None:
    temperature, top_k, top_p = _KINDS[kind]
    falling, order = (logits / temperature).sort(dim=-1, descending=True)
    if top_k:
        falling[:, top_k:] = -torch.inf
    probs = falling.softmax(dim=-1)
    probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    order.gather(1, torch.multinomial(probs, 1))


def _flashinfer_draw(logits: torch.Tensor, kind: str) -> None:
    import flashinfer

    temperature, top_k, top_p = _KINDS[kind]
    probs = (logits / temperature).softmax(dim=-1)
    if top_k:
        flashinfer.sampling.top_k_top_p_sampling_from_probs(probs, top_k, top_p)
    elif top_p < 1.0:
        flashinfer.sampling.top_p_sampling_from_probs(probs, top_p)
    else:
        flashinfer.sampling.sampling_from_probs(probs)


def _edits(device: torch.device, rows: int, vocab: int, used: bool) -> EditTensors:
    def lines() -> torch.Tensor:
        return torch.arange(rows, device=device, dtype=torch.int32) if used else minus.clone()

    minus = torch.full((rows,), -1, device=device, dtype=torch.int32)
    words, full = num_words(vocab), {"device": device, "dtype": torch.int32}
    tokens = torch.full((rows, 64), NO_TOKEN, **full)
    if used:
        tokens[:, :40] = torch.randint(0, vocab, (rows, 40), device=device).sort(dim=1).values
    return EditTensors(
        penalty_lines=lines(),
        repetition=torch.full((rows,), 1.2, device=device),
        frequency=torch.full((rows,), 0.3, device=device),
        presence=torch.full((rows,), 0.1, device=device),
        prompt_bits=torch.randint(-(2**31), 2**31, (rows, words), device=device).int(),
        counts=(torch.rand((rows, vocab), device=device) < 0.005).int(),
        bias_tokens=tokens,
        biases=torch.randn((rows, 64), device=device),
        mask_lines=lines(),
        mask_bits=torch.randint(-(2**31), 2**31, (rows, words), device=device).int(),
    )


def _prepare_edits(device: torch.device, rows: int, vocab: int, used: bool, tiny: bool) -> Prepared:
    ops, twin = dispatch.choose(device), dispatch.choose(device, ())
    raw, edits = _logits(device, rows, vocab, tiny), _edits(device, rows, vocab, used)
    temperature = torch.full((rows,), 0.8, device=device)
    workspace, out = ops.sample_workspace(rows, vocab), torch.empty_like(raw[0])
    turn = itertools.cycle(range(len(raw)))

    def call(which: Any, inputs: torch.Tensor) -> None:
        which.logits(out, inputs, edits, temperature, workspace)

    def error() -> float:
        call(twin, raw[0].clone())
        expected = out.clone()
        out.fill_(torch.nan)
        call(ops, raw[0])
        allowed = expected.isfinite()
        if not torch.equal(out.isfinite(), allowed):
            return float("inf")
        difference = (out[allowed].double() - expected[allowed]).abs().max()
        return float(difference / expected[allowed].abs().max())

    table_bytes = rows * (vocab * 4 + num_words(vocab) * 8) if used else 0
    return Prepared(
        lambda: call(ops, raw[next(turn)]),
        error,
        1e-5,
        2 * rows * vocab * 4 + table_bytes,
        peers={"torch division": lambda: (raw[next(turn)].div(0.8), None)[1]},
    )


def _prepare_verify(device: torch.device, rows: int) -> Prepared:
    ops, twin = dispatch.choose(device), dispatch.choose(device, ())
    draws = torch.randint(0, 2, (rows, 8), device=device)
    proposals = torch.randint(0, 2, (rows, 7), device=device)
    numbers = torch.full((rows,), 7, dtype=torch.int32, device=device)
    accepted, following = torch.empty_like(numbers), torch.empty_like(draws[:, 0])

    def call(which: Any) -> None:
        which.verify(accepted, following, draws, proposals, numbers)

    def error() -> float:
        call(twin)
        expected = accepted.clone(), following.clone()
        accepted.fill_(-1)
        call(ops)
        same = torch.equal(accepted, expected[0]) and torch.equal(following, expected[1])
        return 0.0 if same else float("inf")

    peers = {"torch": lambda: call(twin)}
    return Prepared(lambda: call(ops), error, 0.0, rows * 16 * 8, peers=peers)
