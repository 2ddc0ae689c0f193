"""What the devices could do at most: the denominator of MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..models.count import training_flops_per_token
from .records import Speed

if TYPE_CHECKING:
    from .job import Job

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
    """The model's FLOPs, and the peak of so many devices where it is known."""
    lengths = {phase.seq_len for phase in job.plan.phases}
    flops = {length: training_flops_per_token(job.model, length) for length in lengths}
    peak = job.run.watch.peak_flops or _known(job.run.device)
    return Speed(flops, peak * world if peak else None)


def _known(device: str) -> float | None:
    if device != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name()
    fitting = [part for part in BF16_PEAK if part in name]
    return BF16_PEAK[max(fitting, key=len)] if fitting else None
