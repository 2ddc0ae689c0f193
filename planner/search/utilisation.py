"""Model FLOPs utilisation of a plan: what a run of this speed would record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...models.accounting.stored import load_or_compute
from ...models.config.options.recompute import expand_rules

RECORD = Path(__file__).parents[2] / "trainer" / "record"
"""Code that a stored count depends on."""

if TYPE_CHECKING:
    from .make import PlanRequest


def compute_mfu(request: PlanRequest, seq_len: int, tokens_per_second: float) -> float | None:
    """Return the utilisation; None for modules that are not ours, or without a peak in the file."""
    peaks = [peak.rate for peak in request.hardware.file.peaks if peak.precision == "bf16"]
    if not peaks or request.modules is not None:
        return None
    question = f"FLOPs {request.model!r} {seq_len} {request.run.fp8!r}"
    flops = load_or_compute(question, lambda: _count_flops(request, seq_len), source=RECORD)
    return float(flops * tokens_per_second / (peaks[0] * request.gpus))


def _count_flops(request: PlanRequest, seq_len: int) -> float:
    """Return the training FLOPs of a token, in units of the time that they need at the peak."""
    from ...trainer.record.speed import count_speed

    rules = expand_rules(request.run.recompute, len(request.model.layers))
    speed = count_speed(request.model, {seq_len}, rules=rules, peak=1.0, fp8=request.run.fp8)
    utilisation = speed.mfu(seq_len, 1.0)
    assert utilisation is not None
    return utilisation
