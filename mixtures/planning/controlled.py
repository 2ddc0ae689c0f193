"""Phases whose shares a controller decides during the run: contradictions, and bounds.

A plan has the shares with which such a phase begins. The decisions stay within bounds, which follow
from the controller's settings, and within the `max_epochs` of every source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...dataplane.order.plan import Phase, Plan
from ..controllers import load_controller
from ..mixture_file.check import MixtureFinding
from .shares import drawn_shares


def control_problems(plan: Plan) -> Iterator[MixtureFinding]:
    """Yield controllers that contradict the sources of their phases."""
    has_refills = any(source.refills for source in plan.sources)
    for phase in plan.phases:
        if not phase.control:
            continue
        path = ("phases", phase.name, "control")
        controller = load_controller(phase.control)
        for key, message in controller.source_problems(list(begin_shares(plan, phase))):
            yield MixtureFinding((*path, *([key] if key else [])), message)
        if has_refills:
            yield MixtureFinding(path, "contradicts `refill`: refilled rows fix the order")
        if plan.lengths:
            yield MixtureFinding(
                path,
                "contradicts `steps_by_length`: the plan gives each step a length before its rows "
                "a source; plan the change (`weights: {from: …, to: …}`), or change the shares in "
                "a branch (`after:`)",
            )


def begin_shares(plan: Plan, phase: Phase) -> dict[str, float]:
    """Return the shares with which a phase begins, of the sources that it draws from."""
    shares = zip(plan.sources, drawn_shares(phase), strict=True)
    return {source.name: float(share) for source, share in shares if share}


def share_bounds(plan: Plan, phase: Phase) -> Mapping[str, tuple[float, float]]:
    """Return the smallest and the largest share of each source that the phase draws from; empty
    without a controller."""
    if not phase.control:
        return {}
    controller = load_controller(phase.control)
    return controller.bounds(begin_shares(plan, phase), phase.steps)
