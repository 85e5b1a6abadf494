"""Capacities of devices: memory, and the two ceilings of the roofline. It is a table of figures with their sources.

The module measures nothing; `cpu_speed.py` measures a CPU's figures when they are needed. Rates are dense (without
sparsity). The memory of a datasheet is its decimal figure, a little less than the device shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from workers.engine.sizing.capacity import Ceilings, Format
from workers.engine.values.errors import ModelError


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory: int
    """Total bytes of memory. On a CPU they are the free ones."""
    bytes_per_s: float
    flops_per_s: float
    """FLOP/s in bfloat16 and float16 with float32 sums."""
    float32_flops_per_s: float
    fp8_flops_per_s: float
    """FLOP/s in fp8. It is 0 if the device has no 8-bit floats."""
    source: str
    is_cpu: bool = False

    def ceilings(self, dtype: str, quant: Format = "none") -> Ceilings:
        """Returns the device's largest rates. Raises ModelError if the device cannot compute in the format."""
        if quant == "fp8" and not self.is_cpu and not self.fp8_flops_per_s:
            raise ModelError(f"The device {self.name} has no 8-bit floats: use int8.")
        flops = self.float32_flops_per_s if dtype == "float32" else self.flops_per_s
        return Ceilings(self.bytes_per_s, flops, self.fp8_flops_per_s if quant == "fp8" else 0.0)


def _sheet(
    name: str, gb: int, gb_per_s: float, tflops: float, float32: float, fp8: float, source: str
) -> tuple[str, Device]:
    rates = (tflops * 1e12, float32 * 1e12, fp8 * 1e12)
    return name, Device(name, gb * 10**9, gb_per_s * 1e9, *rates, f"datasheet: {source}")


TABLE: Mapping[str, Device] = MappingProxyType(
    {
        "h200": Device(
            "h200",
            139 << 30,
            4.3e12,
            790e12,
            67e12,
            1979e12,
            "measured on an H200 SXM: copy, square bf16 product, memory; float32 and fp8 from NVIDIA's H200 datasheet",
        ),
        **dict(
            (
                _sheet("h100", 80, 3350, 989, 67, 1979, "NVIDIA H100 Tensor Core GPU, SXM5"),
                _sheet("a100-80g", 80, 2039, 312, 19.5, 0, "NVIDIA A100 Tensor Core GPU, SXM4 80 GB"),
                _sheet("a100-40g", 40, 1555, 312, 19.5, 0, "NVIDIA A100 Tensor Core GPU, SXM4 40 GB"),
                _sheet("l40s", 48, 864, 362, 91.6, 733, "NVIDIA L40S GPU"),
                _sheet("l4", 24, 300, 121, 30.3, 242, "NVIDIA L4 Tensor Core GPU"),
                _sheet("a10", 24, 600, 125, 31.2, 0, "NVIDIA A10 Tensor Core GPU"),
                _sheet("rtx4090", 24, 1008, 165.2, 82.6, 330.3, "NVIDIA Ada GPU Architecture, appendix A"),
            )
        ),
    }
)


def named(name: str) -> Device | None:
    """Returns the device of this driver name, such as "NVIDIA A100-SXM4-80GB" or "NVIDIA GeForce RTX 4090", or None."""
    words = name.lower().replace("-", " ").replace("geforce rtx ", "rtx").split()
    for key, device in TABLE.items():
        chip, _, size = key.partition("-")
        if chip in words and (not size or any(word.startswith(size) for word in words)):
            return device
    return None
