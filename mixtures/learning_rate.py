"""The learning rate of each step of a plan, in multiples of the run's peak.

A step uses the curve's value in the middle of its tokens. So neither the first step of a warm-up
from 0 nor the last step of a decay to 0 has a learning rate of 0. (Shape savanna reads the value at
the first token, as Savanna does.)
"""

from __future__ import annotations

from ..dataplane.order.plan import Phase, Plan
from .lr_shapes import shape_of


def lr_factor(plan: Plan, step: int) -> float:
    """Return the factor by which a step multiplies the run's peak learning rate."""
    planned = plan.step(step)
    phase = planned.phase
    shape = shape_of(phase.lr)
    within = planned.rows * phase.seq_len * shape.read_at
    return shape.factor(planned.first_token - phase.first_token + within, phase.tokens)


def lr_at(phase: Phase, token: float) -> float:
    """Return the factor after `token` tokens of a phase."""
    return shape_of(phase.lr).factor(token, phase.tokens)
