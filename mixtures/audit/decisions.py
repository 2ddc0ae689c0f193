"""Show the decisions of a run, and repeat those of controllers from what they recorded.

A decision is as it must be if its line chains to those before it and says how many rows each source
had given. That of a controller must follow, bit by bit, from its settings and the losses, as
recorded, and from what the plan and the decisions before say: the shares in force, the controller's
memory, and the limits by `max_epochs` at this row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...console.errors import IntegrityError, PlanError
from ...dataplane.order.steered import SteeredOrder
from ...dataplane.order.stream import Stream
from ...dataplane.runlog import decisions as files
from ...dataplane.runlog.decisions import RecordedDecision
from ..controllers.controller import Observed
from ..planning.open_plan import OpenedPlan
from ..steering.decide import HAND, last_state, repeat_controller, shares_in_force
from ..steering.limits import find_limits


@dataclass(frozen=True, kw_only=True)
class AuditedDecision:
    """A decision, with what it could not carry."""

    recorded: RecordedDecision
    phase: str
    written_off: dict[str, float]
    """Tokens by source that were owed, more than a row, and are not carried."""
    unpaid: dict[str, float]
    """Tokens owed to sources that these shares leave out; a later decision or phase pays them."""

    def format_text(self) -> str:
        decision = self.recorded
        shares = ", ".join(f"{name} {share:.4%}" for name, share in decision.shares.items())
        lines = [
            f"from step {decision.step:,} (row {decision.row:,}, phase {self.phase}), "
            f"by {decision.by}: {shares}; digest {decision.digest}"
        ]
        if decision.by != HAND:
            why = decision.why
            losses = ", ".join(f"{name} {loss:.4g}" for name, loss in why["losses"].items())
            held_out = ", ".join(f"{loss:.4g}" for loss in why["held_out"])
            lines.append(
                f"  decided after step {why['at'] - 1:,} from "
                + "; ".join(
                    [f"losses {losses}"] * bool(losses)
                    + [f"held-out losses {held_out}"] * bool(held_out)
                )
                + ": repeated, and equal"
            )
        for label, tokens in (("written off", self.written_off), ("owed meanwhile", self.unpaid)):
            if tokens:
                owed = ", ".join(
                    f"{name} {abs(debt):,.0f} tokens {'behind' if debt > 0 else 'ahead'}"
                    for name, debt in tokens.items()
                )
                lines.append(f"  {label}: {owed}")
        return "\n".join(lines)

    def format_json(self) -> str:
        data = {**vars(self.recorded), "phase": self.phase}
        return json.dumps(data | {"written_off": self.written_off, "unpaid": self.unpaid})


def audit_decisions(opened: OpenedPlan) -> Iterator[AuditedDecision]:
    """Yield a run's decisions; raise IntegrityError at one that its controller does not repeat."""
    if opened.run is None:
        raise PlanError("only a run decides shares", hint="give the folder of a run")
    plan, stream = opened.plan, opened.stream
    recorded = files.read_run(opened.run, plan.hash)[: len(plan.decisions)]
    names = [source.name for source in plan.sources]
    before = Stream(replace(plan, decisions=()))
    for number, decision in enumerate(recorded):
        before = before.steer(replace(plan, decisions=plan.decisions[:number]))
        counts = zip(names, before.counts(decision.row).tolist(), strict=True)
        taken = {name: count for name, count in counts if count}
        _compare(decision, "taken", taken, decision.taken)
        if decision.by != HAND:
            _check(before, recorded[:number], decision)
        assert isinstance(stream.assignment, SteeredOrder)
        written_off = stream.assignment.written_off(number + 1)
        lost = {name: float(debt) for name, debt in zip(names, written_off, strict=True) if debt}
        owed = dict(zip(names, stream.debts(decision.row), strict=True))
        yield AuditedDecision(
            recorded=decision,
            phase=plan.phase_at(decision.row).name,
            written_off=lost,
            unpaid={
                name: float(debt) - lost.get(name, 0.0)
                for name, debt in owed.items()
                if debt and name not in decision.shares
            },
        )


def _check(stream: Stream, earlier: Sequence[RecordedDecision], decision: RecordedDecision) -> None:
    """Raise unless the phase's controller decides the same from the same inputs. `stream` has the
    `earlier` decisions."""
    plan, why, at = stream.plan, decision.why, decision.why["at"]
    shares, state = shares_in_force(plan, at), last_state(plan, earlier, decision.by, at)
    limits = find_limits(stream, decision.row)
    observed = Observed(losses=why["losses"], held_out=why["held_out"])
    verdict = repeat_controller(why["control"], at, shares, observed, state, limits)
    decided = {name: share for name, share in (verdict.shares or {}).items() if share}
    _compare(decision, "shares", decided, decision.shares)
    for key, repeated in verdict.why.items():
        _compare(decision, key, repeated, why.get(key))


def _compare(decision: RecordedDecision, name: str, repeated: object, value: object) -> None:
    if repeated != value:
        raise IntegrityError(
            f"the decision from step {decision.step:,} on cannot be repeated: its {name} are "
            f"{value}, and should be {repeated}",
            hint="the file was changed, or this headrace has another controller",
        )
