"""The command that users call as `headgate plan`: prints what a model needs, what fits on a device, how fast it can be at
most, and the settings to serve it with.

It reads options and prints. `sizing.plan` computes the figures; `model/census.py` counts the model. It raises one sentence
if a worker could not serve the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from workers.engine.sizing.devices import TABLE, Device, named
from workers.engine.sizing.plan_report import CpuPath, Report
from workers.engine.sizing.sizing import Asked, plan
from workers.engine.values.errors import ModelError

if TYPE_CHECKING:
    from workers.engine.model.census import Census

_TERA, _GIGA = 10**12, 10**9
OWN = "HEADGATE_ENGINE_"


@dataclass(frozen=True, slots=True)
class Overrides:
    memory_gib: float | None
    bandwidth_gb: float | None
    tflops: float | None

    def of(self, device: Device) -> Device:
        given: dict[str, Any] = {}
        if self.memory_gib is not None:
            given["memory"] = int(self.memory_gib * 2**30)
        if self.bandwidth_gb is not None:
            given["bytes_per_s"] = self.bandwidth_gb * _GIGA
        if self.tflops is not None:
            flops = self.tflops * _TERA
            given |= {"flops_per_s": flops, "float32_flops_per_s": flops}
            given["fp8_flops_per_s"] = flops if device.fp8_flops_per_s else 0.0
        return replace(device, **given, source=f"{device.source}; options") if given else device


@click.command(
    "plan",
    epilog="\b\nExample:\n  headgate plan Qwen/Qwen3-0.6B --gpu l4 --context 8192",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("model", envvar="HEADGATE_MODEL")
@click.option(
    "--gpu",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", *TABLE, "cpu"]),
    help="Device to compute for; auto is the first GPU of this machine, else its CPU.",
)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of the device in GiB.  [default: as the device has]",
)
@click.option(
    "--bandwidth-gb",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory bandwidth in GB/s.  [default: as the device has]",
)
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    help="TFLOP/s of dense matrix products.  [default: as the device has]",
)
@click.option(
    "--dtype",
    envvar=f"{OWN}DTYPE",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    help="Number format to compute in; auto is the checkpoint's, or float32 on a CPU that is slower in that one.",
)
@click.option(
    "--kv-dtype",
    envvar=f"{OWN}KV_DTYPE",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "int8", "fp8"]),
    help="Number format of the KV cache; auto is that of --dtype.",
)
@click.option(
    "--quant",
    envvar=f"{OWN}QUANT",
    default="none",
    show_default=True,
    type=click.Choice(["none", "int8", "int4", "fp8", "w8a8", "llm_int8"]),
    help="Quantization of the linear layers.",
)
@click.option(
    "--tensor-parallel",
    envvar=f"{OWN}TENSOR_PARALLEL",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    metavar="N",
    help="Number of devices that each copy of the model is split over.",
)
@click.option(
    "--block-size",
    envvar=f"{OWN}BLOCK_SIZE",
    default=16,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Number of tokens in a block of the KV cache.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=click.IntRange(min=1),
    help="Number of tokens of prompt and output together; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def main(
    model: str,
    gpu: str,
    memory_gib: float | None,
    bandwidth_gb: float | None,
    tflops: float | None,
    dtype: str,
    kv_dtype: str,
    quant: str,
    tensor_parallel: int,
    block_size: int,
    contexts: tuple[int, ...],
    as_json: bool,
) -> None:
    """Print what MODEL (a directory, of which config.json is enough, or a hub id) needs and can reach on a device."""
    overrides = Overrides(memory_gib, bandwidth_gb, tflops)
    try:
        device = overrides.of(_device(gpu, tensor_parallel))
        if (encoder := _encoder(model, device, dtype)) is not None:
            click.echo(json.dumps(encoder) if as_json else _encoder_sentences(encoder))
            return
        census, reason = _census(model, device, dtype, kv_dtype, quant, tensor_parallel)
        asked = Asked(device, tensor_parallel, block_size, contexts)
        found = plan(census.rank, census.context_limit, census.dtype, asked)
    except ModelError as error:
        raise click.ClickException(str(error)) from None
    settings = {"MODEL": model, "DTYPE": census.dtype, "KV_DTYPE": kv_dtype, "QUANT": quant}
    path = _cpu_path(model, census.dtype, settings, tensor_parallel) if device.is_cpu else None
    report = Report(census.whole, census.rank, census.context_limit, asked, found, settings, reason, path)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        report.show()


def _device(name: str, num_ranks: int) -> Device:
    """Returns the device of this name, measured if it is a CPU. Raises ModelError for an unknown GPU."""
    if name in TABLE:
        return TABLE[name]
    import torch

    from workers.engine.commands import cpu_speed

    if name == "auto" and torch.cuda.is_available():
        told = torch.cuda.get_device_name(0)
        known = named(told)
        if known is None:
            raise ModelError(
                f"The GPU {told} is not in the table: name the nearest one with --gpu, and its figures with "
                "--memory-gib, --bandwidth-gb and --tflops."
            )
        return replace(known, memory=torch.cuda.get_device_properties(0).total_memory)
    return cpu_speed.measure(num_ranks)


def _census(model: str, device: Device, dtype: str, kv_dtype: str, quant: Any, num_ranks: int) -> tuple[Census, str]:
    """Counts the model and returns the count with the reason for its dtype. Raises ModelError."""
    import torch

    from workers.engine.checkpoint import dtypes, stored
    from workers.engine.model import census

    config = census.read_config(model)
    kind = torch.device("cpu" if device.is_cpu else "cuda")
    scheme = stored.scheme_of(config)
    stored.refuse_beside(scheme, quant, num_ranks)
    quant = scheme.counts_as if scheme else quant
    chosen = dtypes.of_model(dtype, kind, config, rounded=quant != "none")
    if kv_dtype == "fp8" and not device.is_cpu and not device.fp8_flops_per_s:
        raise ModelError(f"The device {device.name} has no 8-bit floats: use int8.")
    kv_itemsize = None if kv_dtype == "auto" else 1
    taken = census.take(config, chosen.dtype, kv_itemsize, quant, num_ranks, device.is_cpu)
    return taken, chosen.reason


def _cpu_path(model: str, dtype: str, settings: Mapping[str, str], num_ranks: int) -> CpuPath:
    import torch

    from workers.engine.layers import cpu_path
    from workers.engine.model import census, layer_kinds

    config = census.read_config(model)
    is_exact = settings["QUANT"] == "none" and settings["KV_DTYPE"] == "auto" and num_ranks == 1
    whole = is_exact and layer_kinds.is_compiled(config)
    return CpuPath(cpu_path.of_products(getattr(torch, dtype)), cpu_path.of_layers(whole))


def _encoder(model: str, device: Device, dtype: str) -> dict[str, Any] | None:
    """Returns what an encoder needs, or None for any other model: it keeps no KV, so all that is known is its weights.
    Raises ModelError."""
    import torch

    from workers.engine.checkpoint import dtypes
    from workers.engine.model import census

    found = census.num_encoder_parameters(model)
    if found is None:
        return None
    number, config = found
    chosen = dtypes.of_model(dtype, torch.device("cpu" if device.is_cpu else "cuda"), config)
    num_bytes = number * chosen.dtype.itemsize
    return {
        "model_type": config.model_type,
        "parameters": number,
        "dtype": chosen.name,
        "weight_bytes": num_bytes,
        "device": device.name,
        "fits": num_bytes < device.memory,
    }


def _encoder_sentences(found: dict[str, Any]) -> str:
    fits = "fits" if found["fits"] else "does not fit"
    return (
        f"The encoder {found['model_type']} has {found['parameters']:,} parameters: {found['weight_bytes'] / 2**30:.2f} GiB"
        f" in {found['dtype']}. It keeps no KV, and {fits} the memory of {found['device']}."
    )
