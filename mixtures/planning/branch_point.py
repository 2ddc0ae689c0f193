"""Continue another run's stream: the position, and the remaining tokens by source.

A source keeps its order and position if the order still fits: the dataset has not grown, and chunks
are multiples of the new sequence lengths. Otherwise, or on request, it starts a new order over the
epoch's unserved tokens and the new tokens in the dataset.

Sources that the new mixture does not use stay in the plan, so that a later mixture finds their
positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from ...console.errors import PlanError
from ...dataplane.order.plan import Decision, Parent, Phase, Plan
from ...dataplane.order.source_order import Position, SourceOrder, UnservedTokens
from ...dataplane.order.steered import decided_phases
from ...dataplane.order.stream import Stream
from ...dataplane.runlog.decisions import load_run_plan
from ...dataplane.storage import storage
from ..mixture_file.check import Inherited, MixtureFinding
from ..mixture_file.mixture import After, Mixture, SourceSpec, explicit_shares, find_temperature
from .open_sources import OpenedSource
from .shares import Shares, drawn_shares

CHECKPOINT = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class BranchPoint:
    """The plan of another run, and the row at which a mixture continues it."""

    plan: Plan
    stream: Stream
    row: int
    step: int
    token: int
    run: str
    reshuffle: bool = False
    """True if no source keeps its order."""
    kept: tuple[Decision, ...] = ()
    """Decisions of the run from `row` on whose shares the mixture keeps."""
    listed: frozenset[str] = frozenset()
    """Sources that the mixture lists itself; others keep their settings."""

    @property
    def parent(self) -> Parent:
        return Parent(hash=self.plan.hash, row=self.row, run=self.run, phases=self.shares())

    @property
    def last_phase(self) -> Phase:
        return self.plan.phase_at(max(self.row - 1, self.plan.first_row))

    @property
    def inherited(self) -> Inherited:
        phase = self.last_phase
        return Inherited(
            phases=tuple(self.shares()),
            sources=tuple(source.name for source in self.plan.sources),
            seq_len=phase.seq_len,
            batch=phase.batch_rows * phase.seq_len,
        )

    @cached_property
    def positions(self) -> tuple[Position, ...]:
        """Positions by source, in rows with the last phase's length."""
        return self.stream.positions(self.row)

    def shares(self) -> dict[str, dict[str, Fraction]]:
        """Return, by phase, the average shares by which a replay draws, including phases of
        continued runs."""
        names = [source.name for source in self.plan.sources]
        by_phase = {
            name: dict(shares)
            for name, shares in (self.plan.parent.phases if self.plan.parent else {}).items()
        }
        for phase in decided_phases(self.plan):
            shares = zip(names, drawn_shares(phase), strict=True)
            by_phase[phase.name] = {name: share for name, share in shares if share}
        return by_phase


def open_branch_point(after: After) -> BranchPoint:
    """Find the row at which a mixture continues another run."""
    plan = load_run_plan(after.run)
    if any(source.refills for source in plan.sources):
        raise PlanError(
            f"the run {after.run} has refilled rows from beyond its end (`refill`), which a "
            "continuation would serve again",
            hint="continue a run whose mixture has `without` alone",
        )
    step = _newest_checkpoint_step(after.run) if after.step is None else after.step
    if not plan.first_step <= step <= plan.end_step:
        raise PlanError(
            f"the run {after.run} has no step {step}: its plan covers steps {plan.first_step} to "
            f"{plan.end_step}",
            hint="choose another `after.step`",
        )
    if step == plan.end_step:
        row, token = plan.end_row, plan.end_token
    else:
        at = plan.step(step)
        row, token = at.first_row, at.first_token
    decisions = tuple(decision for decision in plan.decisions if decision.row < row)
    kept = plan.decisions[len(decisions) :] if after.decisions == "keep" else ()
    plan = replace(plan, decisions=decisions)
    return BranchPoint(plan, Stream(plan), row, step, token, after.run, after.reshuffle, kept)


def check_checkpoint(after: After) -> None:
    """Raise if a run has checkpoints, but none at the continued step: the new run would have no
    weights. A run without checkpoints, such as a plan alone, is not checked."""
    steps = checkpoint_steps(after.run)
    if steps and after.step is not None and after.step not in steps:
        raise PlanError(
            f"the run {after.run} has no checkpoint of step {after.step}; it has "
            f"{', '.join(map(str, steps))}"
        )


def checkpoint_steps(run: str) -> list[int]:
    """List the steps with a checkpoint. A folder step-N exists only once complete."""
    names = storage.names(storage.join(run, "checkpoints"))
    return sorted(int(match[1]) for match in map(CHECKPOINT.match, names) if match)


def _newest_checkpoint_step(run: str) -> int:
    """Find the newest step with a checkpoint."""
    steps = checkpoint_steps(run)
    if not steps:
        raise PlanError(f"the run {run} has no checkpoint yet; set `after.step`")
    return max(steps)


def add_inherited_sources(mixture: Mixture, branch: BranchPoint) -> Mixture:
    """Add the run's sources that the mixture uses: by name, by replaying a phase, or in shares from
    source sizes."""
    used = {name for phase in mixture.phases.values() for name in explicit_shares(phase)}
    names = {*mixture.sources, *mixture.phases, *branch.inherited.phases, *branch.inherited.sources}
    if any(find_temperature(phase, names) is not None for phase in mixture.phases.values()):
        used |= set(branch.inherited.sources)
    for phase, shares in branch.shares().items():
        if phase in used:
            used |= set(shares)
    missing = {
        source.name: SourceSpec(
            data=source.url, max_epochs=source.max_epochs, generations=source.generations
        )
        for source in branch.plan.sources
        if source.name in used and source.name not in mixture.sources
    }
    return replace(mixture, sources={**mixture.sources, **missing})


def source_conflicts(
    branch: BranchPoint, opened: Mapping[str, OpenedSource]
) -> Iterator[MixtureFinding]:
    """Yield sources that differ from those in the continued run."""
    before = {source.name: source for source in branch.plan.sources}
    consumed = {source.dataset: source.name for source in branch.plan.sources}
    for name, source in opened.items():
        path = ("sources", name, "data")
        hashes = [generation.hash for generation in source.generations]
        if name in before:
            if before[name].dataset in hashes:
                continue
            if before[name].dataset in (g.hash for g in source.manifest.generations):
                message = f"the run has already used {before[name].generations} generations"
                yield MixtureFinding(("sources", name, "generations"), message)
            else:
                yield MixtureFinding(path, "is not the dataset that the run uses under this name")
            continue
        old_name = next((consumed[hash] for hash in hashes if hash in consumed), None)
        if old_name is not None:
            yield MixtureFinding(
                path,
                f"is the run's source {old_name}: under another name, tokens that the run "
                "consumed would be served again",
            )


def continued_order(
    fresh: SourceOrder, branch: BranchPoint, index: int, length: int, lengths: Sequence[int]
) -> tuple[SourceOrder, Position]:
    """Return a source's order after the run, and the first position.

    This is the run's order where it fits, else `fresh` over the unserved tokens. `length` is the
    first new phase's sequence length, `lengths` lists all new phases'.
    """
    before, position = branch.plan.sources[index].order, branch.positions[index]
    before_length = branch.last_phase.seq_len
    if before.direction and branch.plan.sources[index].name not in branch.listed:
        window = max(1, round(Fraction(before.window * before.chunk, fresh.chunk)))
        fresh = replace(fresh, window=window, direction=before.direction)
    grown = fresh.tokens > before.tokens
    same_order = all(
        getattr(fresh, name) == getattr(before, name) for name in ("chunk", "window", "direction")
    )
    same_order = same_order and not branch.reshuffle
    if same_order and not grown and all(before.chunk % new_length == 0 for new_length in lengths):
        if length == before_length:
            return before, position
        return before, before.change_length(position, before_length, length)
    starts_in_epoch = (
        before.unserved is not None and before.unserved.position.epoch == position.epoch
    )
    if grown and position.row == 0 and position.epoch > 0 and not starts_in_epoch:
        # An epoch has just ended: new tokens of the dataset still belong to that epoch.
        epoch = position.epoch - 1
        position = Position(epoch=epoch, row=before.end_row(epoch, before_length))
    unserved = UnservedTokens(order=before, position=position, length=before_length)
    return replace(fresh, unserved=unserved), Position(epoch=position.epoch)


def keep_decisions(plan: Plan, branch: BranchPoint) -> Plan:
    """Plan the shares that the run has decided after the branch: a stretch for each decision."""
    before, names = ([source.name for source in p.sources] for p in (branch.plan, plan))
    drawn_shares_by_phase = {phase.name: drawn_shares(phase) for phase in plan.phases}
    for decision in branch.kept:
        if decision.row >= plan.end_row:
            break
        weights = dict(zip(before, decision.weights, strict=True))
        phase = plan.phase_at(decision.row)
        row = decision.row
        if plan.lengths:  # shares are constant over whole steps
            row += (phase.first_row - row) % phase.batch_rows
        if row == phase.end_row:
            continue
        drawn = zip(names, drawn_shares_by_phase[phase.name], strict=True)
        missing = {name for name, weight in weights.items() if weight} - {n for n, s in drawn if s}
        if missing:
            raise PlanError(
                f"the run {branch.run} has decided shares of {', '.join(sorted(missing))} from row "
                f"{decision.row:,} on, and phase {phase.name} does not draw from it",
                hint="use `after.decisions: drop`",
            )
        moved = replace(decision, row=row, weights=tuple(weights.get(name, 0) for name in names))
        phases = decided_phases(replace(plan, decisions=(moved,)))
        plan = replace(plan, phases=phases)
    return plan


def inherited_debts(branch: BranchPoint, names: Sequence[str]) -> tuple[Fraction, ...]:
    """Compute, by source, the tokens owed since row 0."""
    known = [source.name for source in branch.plan.sources]
    debts = dict(zip(known, branch.stream.debts(branch.row), strict=True))
    return tuple(debts.get(name, Fraction(0)) for name in names)


def replayed_shares(branch: BranchPoint, names: Sequence[str]) -> dict[str, Shares]:
    """Return, by phase, the shares with which a replay draws from the sources `names`."""
    return {
        phase: tuple(shares.get(name, Fraction(0)) for name in names)
        for phase, shares in branch.shares().items()
    }
