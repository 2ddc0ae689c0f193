"""Speed of a run: FLOPs of a token, peak of the devices (for MFU and HFU), and memory in use."""

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
"""Dense bf16 FLOP/s of a device, by a part of its driver's name; the longest match counts.

From NVIDIA's data sheets, which print twice as much, with sparsity: H100 (SXM, PCIe, NVL), H200,
HGX B200 and B300 (36 PFLOP/s of eight devices). H800 has the arithmetic of H100, and H20 0.15 of
it."""


@dataclass(frozen=True)
class Speed:
    """Counts from which MFU and HFU follow."""

    flops_per_token: dict[int, float]
    """FLOPs that training takes, by sequence length."""
    executed_per_token: dict[int, float]
    """The same, with recomputed operations counted a second time."""
    peak: float | None
    """bf16 FLOP/s of all devices together; None if it is not known."""
    fp8_per_token: float = 0.0
    """FLOPs in FP8 that training takes. Every device multiplies twice as fast in FP8 as in bf16, so
    they count half: a utilisation is the time of all FLOPs at the peak of their precision, divided
    by the time that they took."""
    fp8_executed_per_token: float = 0.0
    """The same, with recomputed operations counted a second time."""

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


def speed_of(
    config: ModelConfig,
    lengths: Iterable[int],
    *,
    rules: Sequence[Rule],
    peak: float | None,
    fp8: Fp8Config | None = None,
) -> Speed:
    """Count the FLOPs of a token for each sequence length. `peak` is the bf16 peak of all
    devices."""
    model = build_meta(config)
    flops = {length: TRAINING * sum(forward_flops(model, length).values()) for length in lengths}
    again = {length: recomputed_flops(model, length, rules) for length in flops}
    executed = {length: flops[length] + again[length] for length in flops}
    found = [each for each in iterate_matrices(model, fp8) if each.reason is None] if fp8 else []
    narrow = FP8_PRODUCTS * sum(each.flops for each in found)
    repeated = [each for each in found if each.layer is not None and recomputes(rules[each.layer])]
    return Speed(flops, executed, peak, narrow, narrow + sum(each.flops for each in repeated))


def recomputes(rule: Rule) -> bool:
    """Return True if the backward pass computes a layer's matrix products again."""
    return rule != "none" and not (isinstance(rule, Selective) and "matmul" in rule.save)


def known_peak(device: str) -> float | None:
    """Return the peak FLOP/s of this machine's device, or None if it is not in the table."""
    if device != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name()
    matches = [part for part in BF16_PEAK if part in name]
    return BF16_PEAK[max(matches, key=len)] if matches else None


def memory_used(device: str) -> int:
    """Return the most bytes that this rank has held: of its GPU's memory, or of the host's."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
