"""The learning rate of a step: a phase's warm-up and shape, in multiples of the run's peak.

A step's rate is the curve's value in the middle of its tokens, so that neither the first step of
a warm-up nor the last of a decay to zero is an update by nothing.
"""

from __future__ import annotations

import math

from ..dataplane.order.plan import Phase, Plan
from .spec.mixture import LearningRate


def lr_factor(plan: Plan, step: int) -> float:
    """What the run's peak learning rate is multiplied by at a step."""
    taken = plan.step(step)
    phase = taken.phase
    middle = taken.first_token - phase.first_token + taken.rows * phase.seq_len / 2
    return lr_at(phase, middle)


def lr_at(phase: Phase, token: float) -> float:
    """The curve's value after `token` tokens of a phase."""
    lr = LearningRate(**phase.lr)
    if token < lr.warmup:
        return lr.warmup_from + (lr.peak - lr.warmup_from) * token / lr.warmup
    after = max(phase.tokens - lr.warmup, 1)
    done = min((token - lr.warmup) / after, 1.0)
    if lr.shape == "linear":
        return lr.peak + (lr.end - lr.peak) * done
    if lr.shape == "cosine":
        return lr.end + (lr.peak - lr.end) * (1 + math.cos(math.pi * done)) / 2
    if lr.shape == "exponential":
        return lr.peak * math.pow(lr.end / lr.peak, done)
    if lr.shape == "wsd":
        assert lr.decay is not None
        decayed = max(token - (phase.tokens - lr.decay), 0.0) / lr.decay
        return lr.peak + (lr.end - lr.peak) * min(decayed, 1.0)
    return lr.peak
