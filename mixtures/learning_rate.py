"""A step's learning rate by the plan, in multiples of the run's peak.

A step uses the curve's value at the middle of its tokens, so that neither the first step of a
warm-up from 0 nor the last step of a decay to 0 is without effect. (Shape savanna reads the value
at the first token, as Savanna does.)
"""

from __future__ import annotations

from ..dataplane.order.plan import Phase, Plan
from .lr_shapes import load_shape


def lr_factor(plan: Plan, step: int) -> float:
    """Compute the factor on the run's peak learning rate in a step."""
    planned = plan.step(step)
    phase = planned.phase
    shape = load_shape(phase.lr)
    offset = planned.rows * phase.seq_len * shape.read_at
    return shape.factor(planned.first_token - phase.first_token + offset, phase.tokens)


def learning_rate_at(phase: Phase, token: float) -> float:
    """Compute the factor after `token` tokens in a phase."""
    return load_shape(phase.lr).factor(token, phase.tokens)
