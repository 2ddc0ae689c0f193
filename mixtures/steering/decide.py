"""Make a decision: check shares that a person wants, or ask a phase's controller.

Every decision holds `max_epochs`: shares that would exhaust a source before the plan's end are
refused; those of a controller are cut to what the source has left (limits.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ...console.errors import PlanError
from ...console.explain import nearest
from ...dataplane.order.plan import Phase, Plan
from ...dataplane.order.stream import Stream
from ...dataplane.runlog.decisions import TOLERANCE, RecordedDecision, add_decisions
from ..controllers import load_controller
from ..controllers.controller import Observed, Shares, State
from ..planning.controlled import begin_shares
from .limits import find_limits, fit_limits

HAND = "hand"
LEAD_STEPS = 2
"""Steps between the last one that is read and the first that may follow a decision: a GPU has
launched the step between them."""


@dataclass(frozen=True)
class Verdict:
    """What a controller decides, and why; `shares` are None if no shares fit."""

    shares: Mapping[str, float] | None
    why: Mapping[str, Any]


def decide_by_hand(
    stream: Stream,
    recorded: Sequence[RecordedDecision],
    shares: Mapping[str, float],
    earliest: int,
    step: int | None,
    request: str,
) -> RecordedDecision:
    """Make the decision of a person, from `step` on, or from the `earliest` step; raise PlanError
    if the plan does not allow it."""
    plan = stream.plan
    if step is not None and step < earliest:
        raise PlanError(
            f"step {step:,} is too early: rows before step {earliest:,} are served or on their way",
            hint="leave --step out: the shares then hold as soon as possible",
        )
    first_step = earliest if step is None else step
    if first_step >= plan.end_step:
        raise PlanError(f"the run ends at step {plan.end_step:,}: nothing is left to decide")
    if recorded and first_step <= recorded[-1].step:
        raise PlanError(
            f"the run has decided already from step {recorded[-1].step:,} on; decisions follow "
            "each other"
        )
    phase = plan.step(first_step).phase
    if phase.control:
        raise PlanError(
            f"phase {phase.name} has a controller ({phase.control['kind']}), which decides its "
            "shares",
            hint="one of the two can decide: branch without `control` to steer by hand",
        )
    _check_shares(plan, phase, shares)
    decision = _record(stream, recorded, first_step, shares, HAND, {"request": request})
    if problem := find_shortage(stream, decision):
        raise PlanError(
            problem, hint="lower the source's share, or branch with a higher `max_epochs`"
        )
    return decision


def decide_by_controller(
    stream: Stream,
    recorded: Sequence[RecordedDecision],
    at: int,
    first_step: int,
    observed: Observed,
) -> RecordedDecision | None:
    """Ask the controller of the phase for a decision from `first_step` on, after the steps before
    `at`; None if no shares fit the sources."""
    plan = stream.plan
    phase = plan.step(at).phase
    control, shares = phase.control, shares_in_force(plan, at)
    state = last_state(plan, recorded, control["kind"], at)
    limits = find_limits(stream, plan.step(first_step).first_row)
    verdict = repeat_controller(control, at, shares, observed, state, limits)
    if verdict.shares is None:
        return None
    decision = _record(stream, recorded, first_step, verdict.shares, control["kind"], verdict.why)
    return None if find_shortage(stream, decision) else decision


def repeat_controller(
    control: Mapping[str, Any],
    at: int,
    shares: Shares,
    observed: Observed,
    state: State,
    limits: Mapping[str, float],
) -> Verdict:
    """Decide as a controller does, from what its decision records."""
    asked, state_after = load_controller(control).decide(shares, observed, state)
    why = {
        "control": dict(control),
        "at": at,
        "losses": dict(observed.losses),
        "held_out": list(observed.held_out),
        "shares": dict(shares),
        "before": dict(state),
        "after": dict(state_after),
        "limits": dict(limits),
    }
    return Verdict(fit_limits(asked, limits), why)


def shares_in_force(plan: Plan, step: int) -> dict[str, float]:
    """Return the shares of a controlled phase's sources at a step, as decimals."""
    phase, row = plan.step(step).phase, plan.step(step).first_row
    shares = begin_shares(plan, phase)
    earlier = [decision for decision in plan.decisions if phase.first_row <= decision.row <= row]
    if not earlier:
        return shares
    weights = {s.name: weight for s, weight in zip(plan.sources, earlier[-1].weights, strict=True)}
    total = sum(earlier[-1].weights)
    return {name: float(Fraction(weights[name], total)) for name in shares}


def last_state(plan: Plan, recorded: Sequence[RecordedDecision], kind: str, at: int) -> State:
    """Return what the controller of a step's phase remembers before it; empty before its first
    decision. A run that repeats steps knows later decisions already."""
    phase = plan.step(at).phase
    for decision in reversed(recorded):
        if decision.row < phase.first_row:
            break
        if decision.by == kind and phase.first_step <= decision.why["at"] < at:
            state: State = decision.why["after"]
            return state
    return {}


def find_shortage(stream: Stream, decision: RecordedDecision) -> str | None:
    """Tell which source a decision would exhaust; None if all last to the plan's end."""
    decided = stream.steer(add_decisions(stream.plan, [decision]))
    shortage = next(decided.shortages(), None)
    return None if shortage is None else f"{shortage.source} {shortage.why}"


def _record(
    stream: Stream,
    recorded: Sequence[RecordedDecision],
    step: int,
    shares: Mapping[str, float],
    by: str,
    why: Mapping[str, Any],
) -> RecordedDecision:
    plan, row = stream.plan, stream.plan.step(step).first_row
    taken = zip(plan.sources, stream.counts(row).tolist(), strict=True)
    return RecordedDecision.chained(
        recorded[-1].digest if recorded else plan.hash,
        step=step,
        row=row,
        shares={name: share for name, share in shares.items() if share},
        by=by,
        why=why,
        taken={source.name: count for source, count in taken if count},
    )


def _check_shares(plan: Plan, phase: Phase, shares: Mapping[str, float]) -> None:
    """Raise unless shares are those of the phase's sources, and sum to 1."""
    if any(source.refills for source in plan.sources):
        raise PlanError(
            "the run has refilled rows from beyond its end (`refill`): its order cannot change"
        )
    if plan.lengths:
        raise PlanError(
            "a run with `steps_by_length` takes no decisions: they divide the rows that are left "
            "among sources, and here the plan gives each step a length before its rows a source",
            hint="change the shares in a branch (`after:`)",
        )
    names = [source.name for source in plan.sources]
    drawn = list(begin_shares(plan, phase))
    for name, share in shares.items():
        if name not in names:
            suggestion = nearest(name, names)
            raise PlanError(
                f"the run has no source {name}",
                hint=f"did you mean {suggestion}?" if suggestion else f"it has {', '.join(names)}",
            )
        if name not in drawn and share:
            raise PlanError(
                f"phase {phase.name} does not draw from {name}: its sources are {', '.join(drawn)}",
                hint="a branch (`after:`) can draw from it",
            )
        if not math.isfinite(share) or share < 0:
            raise PlanError(f"the share of {name} is {share:g}; a share must be at least 0")
    total = sum((Fraction(repr(share)) for share in shares.values()), Fraction(0))
    if abs(total - 1) > TOLERANCE:
        left_out = [name for name in drawn if name not in shares]
        raise PlanError(
            f"the shares sum to {float(total):.6g}; they must sum to 1",
            hint=f"not named: {', '.join(left_out)}" if left_out else None,
        )
