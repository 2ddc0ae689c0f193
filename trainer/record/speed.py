"""FLOPs per token and the devices' peak, for MFU and HFU; peak memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...models.accounting.count import TRAINING, build_meta, forward_flops, recomputed_flops
from ...models.config.options.precision import Fp8Config
from ...models.config.options.recompute import Rule, Selective
from ...models.transforms.fp8 import FP8_PRODUCTS, iterate_matrices

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig

RSS_UNIT = 1 if sys.platform == "darwin" else 1024

BF16_PEAK = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 FLOP/s by device, named by a substring in the driver's name; the longest match counts.

From NVIDIA's data sheets, which print twice as much, with sparsity: H100 (SXM, PCIe, NVL), H200,
HGX B200 and B300 (36 PFLOP/s for eight devices). H800 computes like H100, and H20 at 0.15 times
that."""


@dataclass(frozen=True)
class Speed:
    """Counts from which MFU and HFU follow."""

    flops_per_token: dict[int, float]
    """Training FLOPs, by sequence length."""
    executed_per_token: dict[int, float]
    """Training FLOPs with recomputed operations counted twice, by sequence length."""
    peak: float | None
    """bf16 FLOP/s summed over devices; None if unknown."""
    fp8_per_token: float = 0.0
    """Training FLOPs in FP8. Every device multiplies twice as fast in FP8 as in bf16, so they count
    half: utilisation is the time that all FLOPs need at their precision's peak, over the measured
    time."""
    fp8_executed_per_token: float = 0.0
    """Training FLOPs in FP8 with recomputed operations counted twice."""

    def mfu(self, seq_len: int, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation."""
        flops = self.flops_per_token[seq_len] - self.fp8_per_token / 2
        return self._utilisation(flops, tokens_per_second)

    def hfu(self, seq_len: int, tokens_per_second: float) -> float | None:
        """Hardware FLOPs utilisation."""
        flops = self.executed_per_token[seq_len] - self.fp8_executed_per_token / 2
        return self._utilisation(flops, tokens_per_second)

    def _utilisation(self, flops: float, tokens_per_second: float) -> float | None:
        return None if self.peak is None else flops * tokens_per_second / self.peak


def count_speed(
    config: ModelConfig,
    lengths: Iterable[int],
    *,
    rules: Sequence[Rule],
    peak: float | None,
    fp8: Fp8Config | None = None,
) -> Speed:
    """Count the FLOPs per token by sequence length. `peak` is the bf16 FLOP/s summed over
    devices."""
    model = build_meta(config)
    flops = {length: TRAINING * sum(forward_flops(model, length).values()) for length in lengths}
    executed = {length: flops[length] + recomputed_flops(model, length, rules) for length in flops}
    matrices = [
        matrix for matrix in (iterate_matrices(model, fp8) if fp8 else ()) if matrix.reason is None
    ]
    fp8_flops = FP8_PRODUCTS * sum(matrix.flops for matrix in matrices)
    recomputed = sum(
        matrix.flops
        for matrix in matrices
        if matrix.layer is not None and recomputes_products(rules[matrix.layer])
    )
    return Speed(flops, executed, peak, fp8_flops, fp8_flops + recomputed)


def recomputes_products(rule: Rule) -> bool:
    """Return whether the backward pass recomputes a layer's matrix products."""
    return rule != "none" and not (isinstance(rule, Selective) and "matmul" in rule.save)


def device_peak(device: str) -> float | None:
    """Return the bf16 FLOP/s of this machine's device, or None if it is not in the table."""
    if device != "cuda":
        return None
    import torch

    driver_name = torch.cuda.get_device_name()
    matches = [model for model in BF16_PEAK if model in driver_name]
    return BF16_PEAK[max(matches, key=len)] if matches else None


def peak_memory(device: str) -> int:
    """Return this rank's peak bytes: allocated on its GPU, or resident on the host."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
