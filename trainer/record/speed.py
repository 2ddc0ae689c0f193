"""What the devices could do at most (the denominator of MFU and HFU), and what they hold."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

from ...models.accounting.count import TRAINING, forward_flops_per_token
from .steps import Speed

if TYPE_CHECKING:
    from ..run.run import Job

RSS_UNIT = 1 if sys.platform == "darwin" else 1024

BF16_PEAK = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bf16, by a part of the name that the driver gives; the longest part that fits counts."""


def speed(job: Job, world: int) -> Speed:
    """The FLOPs of a token, and the peak of so many devices where it is known."""
    lengths = {phase.seq_len for phase in job.plan.phases}
    again = job.run.recompute != "none"
    flops = {length: _flops(job, length, again=False) for length in lengths}
    done = {length: _flops(job, length, again=again) for length in lengths}
    peak = job.run.watch.peak_flops or _known(job.run.device)
    return Speed(flops, done, peak * world if peak else None)


def _flops(job: Job, length: int, *, again: bool) -> float:
    """Of training on one token: forward, backward, and the forward pass of all layers again where
    backward computes it instead of having kept it."""
    parts = forward_flops_per_token(job.model, length)
    forward = sum(parts.values())
    return TRAINING * forward + (forward - parts["head"] if again else 0.0)


def memory_used(device: str) -> int:
    """The most that this process has held: of its GPU's memory, or of the host's."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def _known(device: str) -> float | None:
    if device != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name()
    fitting = [part for part in BF16_PEAK if part in name]
    return BF16_PEAK[max(fitting, key=len)] if fitting else None
