"""A plan as JSON and as tables for people.

The module knows words and units. It computes nothing but units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from workers.engine.sizing.capacity import CPU_LIBRARIES, Served, in_words
from workers.engine.sizing.sizing import LEASE_TOKENS, Asked, AtContext, Plan

PREFIX = "HEADGATE_"


@dataclass(frozen=True, slots=True)
class CpuPath:
    """How a CPU computes a model, in words."""

    products: str
    layers: str
    """The way in which everything between the products is computed."""


@dataclass(frozen=True, slots=True)
class Report:
    whole: Served
    rank: Served
    context_limit: int
    asked: Asked
    plan: Plan
    given: dict[str, str]
    """Settings that were asked for, by their names without prefix."""
    dtype_reason: str
    cpu_path: CpuPath | None = None
    """The way of a CPU; None for a GPU."""

    def settings(self) -> dict[str, str | int]:
        """Returns the settings for a worker, by environment variable."""
        told, best = dict(self.given), self.plan.recommended
        own: dict[str, str | int] = {
            **{name: value for name, value in told.items() if name != "MODEL"},
            "TENSOR_PARALLEL": self.asked.num_ranks,
            "BLOCK_SIZE": self.asked.block_size,
            "MAX_MODEL_LEN": best.max_model_len,
            "MAX_BATCH_TOKENS": best.max_batch_tokens,
            "MAX_RUNNING": best.max_running,
        }
        return {f"{PREFIX}MODEL": told["MODEL"]} | {f"{PREFIX}ENGINE_{name}": value for name, value in own.items()}

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan in bytes, seconds, and rates per second. Bytes and blocks are of one rank."""
        size, plan = self.whole.size, self.plan
        return {
            "model": {
                "parameters": size.total,
                "active_parameters": size.active,
                "weight_bytes": self.whole.weight_bytes,
                "kv_bytes_per_token": self.whole.kv_bytes_per_token,
                "context_limit": self.context_limit,
                "dtype": self.given["DTYPE"],
                "dtype_reason": self.dtype_reason,
            },
            "device": asdict(self.asked.device) | {"num_ranks": self.asked.num_ranks},
            "memory": {
                "weight_bytes": plan.weight_bytes,
                "kv_bytes": plan.kv_bytes,
                "kv_bytes_per_token": self.rank.kv_bytes_per_token,
                "terms": plan.terms,
                "fitting_blocks": plan.fitting_blocks,
                "num_blocks": plan.num_blocks,
                "block_size": self.asked.block_size,
                "process_bytes": plan.process_bytes,
            },
            "cpu_path": "" if self.cpu_path is None else self.cpu_path.products,
            "cpu_layers": "" if self.cpu_path is None else self.cpu_path.layers,
            "knee_tokens_per_step": plan.knee,
            "contexts": [_context(each) for each in plan.contexts],
            "settings": self.settings(),
            "watermark_blocks": plan.recommended.watermark_blocks,
            "lease": {"tokens": LEASE_TOKENS, "lasts_s": plan.recommended.lease_s},
        }

    def show(self) -> None:
        console = Console()
        if not console.is_terminal:  # never cut what is piped into a file
            console = Console(width=250)
        console.print(_table(("", ""), self._facts()))
        console.print()
        console.print(_table(_COLUMNS, map(_cells, self.plan.contexts)))
        console.print("Times are floors and rates are ceilings of the roofline; a worker stays below them.\n")
        best = self.plan.recommended
        lines = [f"{name}={value}" for name, value in self.settings().items()]
        lines.append(f"# kept free by the scheduler: {best.watermark_blocks} blocks")
        lines.append(f"# a lease of {LEASE_TOKENS} tokens lasts at least {_time(best.lease_s)}, and is renewed at half")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)

    def _facts(self) -> list[tuple[str, str]]:
        size, plan, device, ranks = (self.whole.size, self.plan, self.asked.device, self.asked.num_ranks)
        each = "" if ranks == 1 else f", on each of {ranks} devices"
        rate = device.ceilings(self.given["DTYPE"]).matmul_flops_per_s
        on_cpu = [
            *(
                []
                if self.cpu_path is None
                else [("products", self.cpu_path.products), ("layers", self.cpu_path.layers)]
            ),
            (
                "process",
                f"{in_words(plan.process_bytes)} once its KV is full, {in_words(CPU_LIBRARIES)} of it for libraries and steps",
            ),
        ]
        return [
            ("parameters", f"{size.total:,} in all, {size.active:,} met by a token"),
            ("dtype", f"{self.given['DTYPE']} ({self.dtype_reason})"),
            (
                "device",
                f"{device.name}: {in_words(device.memory)}, {device.bytes_per_s / 1e9:,.1f} GB/s,"
                f" {rate / 1e12:,.2f} TFLOP/s {self.given['DTYPE']} ({device.source})",
            ),
            ("weights", f"{in_words(plan.weight_bytes)}{each}"),
            ("KV", f"{self.rank.kv_bytes_per_token:,} bytes per token{each}"),
            ("for KV", f"{in_words(plan.kv_bytes)} ({plan.terms})"),
            (
                "blocks",
                f"{plan.fitting_blocks:,} of {self.asked.block_size} tokens fit; a worker takes {plan.num_blocks:,}",
            ),
            ("knee", f"{plan.knee:,.0f} tokens per step: below, memory bounds it, above, arithmetic"),
            *(on_cpu if device.is_cpu else ()),
        ]


_COLUMNS = (
    "context",
    "GFLOP/token",
    "largest batch",
    "step, batch 1",
    "tokens/s",
    "step, largest",
    "tokens/s",
    "bound",
    "prefill tokens/s",
    "first token",
    "bound",
)


def _cells(at: AtContext) -> tuple[str, ...]:
    full = at.full
    return (
        f"{at.context:,}",
        f"{at.flops_per_token / 1e9:.3g}",
        f"{at.largest_batch:,}",
        _time(at.one.seconds),
        f"{at.tokens_per_s:,.0f}",
        _time(full.seconds) if full else "-",
        f"{at.full_tokens_per_s:,.0f}" if full else "-",
        full.bound if full else "-",
        f"{at.prefill_tokens_per_s:,.0f}",
        _time(at.prefill.seconds),
        at.prefill.bound,
    )


def _context(at: AtContext) -> dict[str, Any]:
    full = at.full
    return {
        "context": at.context,
        "flops_per_token": at.flops_per_token,
        "largest_batch": at.largest_batch,
        "step_s": at.one.seconds,
        "tokens_per_s": at.tokens_per_s,
        "largest_step_s": full.seconds if full else None,
        "largest_tokens_per_s": at.full_tokens_per_s,
        "largest_bound": full.bound if full else None,
        "prefill_tokens_per_s": at.prefill_tokens_per_s,
        "first_token_s": at.prefill.seconds,
        "prefill_bound": at.prefill.bound,
    }


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
