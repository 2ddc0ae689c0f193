"""Continuing another run's stream: where it stood, and what each source has left.

A source goes on in the order that it had, from where it stood, if that order fits: the dataset has
not grown, and its chunks hold the new sequence lengths. Otherwise it begins a new order with the
chunks of the epoch that were not begun, and with what the dataset has grown by.

Sources that the new mixture does not weigh are carried along, so that a mixture which comes after
this one still knows how far they were read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from ...console.errors import PlanError
from ...dataplane.order.plan import Parent, Phase, Plan
from ...dataplane.order.source_order import Position, Rest, SourceOrder
from ...dataplane.order.stream import Stream
from ...dataplane.storage import storage
from ..spec.check import Finding, Inherited
from ..spec.mixture import After, Mixture, SourceSpec
from .open_sources import OpenedSource
from .shares import Shares, drawn_shares

PLAN = "plan.json"
CHECKPOINT = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class BranchPoint:
    """The plan that is continued, and the row from which on it is not followed."""

    plan: Plan
    stream: Stream
    row: int
    step: int
    token: int
    run: str

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
        """Where each source stands, in rows of the last phase's length."""
        return self.stream.positions(self.row)

    def shares(self) -> dict[str, dict[str, Fraction]]:
        """By phase of this run and those before it, the shares of its sources: what replaying it
        draws by."""
        names = [source.name for source in self.plan.sources]
        found = {
            name: dict(shares)
            for name, shares in (self.plan.parent.phases if self.plan.parent else {}).items()
        }
        for phase in self.plan.phases:
            shares = zip(names, drawn_shares(phase), strict=True)
            found[phase.name] = {name: share for name, share in shares if share}
        return found


def open_branch_point(after: After) -> BranchPoint:
    """Where in another run a mixture begins."""
    plan = Plan.load(storage.join(after.run, PLAN))
    step = _newest_checkpoint(after.run) if after.step is None else after.step
    if not plan.first_step <= step <= plan.last_step:
        raise PlanError(
            f"the run {after.run} has no step {step}: its plan covers steps {plan.first_step} to "
            f"{plan.last_step}"
        )
    if step == plan.last_step:
        row, token = plan.last_row, plan.last_token
    else:
        at = plan.step(step)
        row, token = at.first_row, at.first_token
    return BranchPoint(plan, Stream(plan), row, step, token, after.run)


def _newest_checkpoint(run: str) -> int:
    """The step of a run's newest checkpoint; a folder of this name exists only when it is whole."""
    names = storage.names(storage.join(run, "checkpoints"))
    steps = [int(match[1]) for match in map(CHECKPOINT.match, names) if match]
    if not steps:
        raise PlanError(f"the run {run} has no checkpoint yet; name the step to branch at")
    return max(steps)


def with_inherited_sources(mixture: Mixture, branch: BranchPoint) -> Mixture:
    """The mixture with those of the run's sources that it weighs, by name or by a replay."""
    weighed = {name for phase in mixture.phases.values() for name in phase.weights}
    for phase, shares in branch.shares().items():
        if phase in weighed:
            weighed |= set(shares)
    missing = {
        source.name: SourceSpec(
            data=source.url, max_epochs=source.max_epochs, generations=source.generations
        )
        for source in branch.plan.sources
        if source.name in weighed and source.name not in mixture.sources
    }
    return replace(mixture, sources={**mixture.sources, **missing})


def source_conflicts(branch: BranchPoint, opened: Mapping[str, OpenedSource]) -> Iterator[Finding]:
    """Sources that are not what they were in the run that is continued."""
    before = {source.name: source for source in branch.plan.sources}
    consumed = {source.dataset: source.name for source in branch.plan.sources}
    for name, source in opened.items():
        place = ("sources", name, "data")
        hashes = [generation.hash for generation in source.generations]
        if name in before:
            if before[name].dataset in hashes:
                continue
            if before[name].dataset in (g.hash for g in source.manifest.generations):
                what = f"the run has used {before[name].generations} generations of it"
                yield Finding(("sources", name, "generations"), what)
            else:
                yield Finding(place, "is another dataset than the run's source of this name")
            continue
        old = next((consumed[hash] for hash in hashes if hash in consumed), None)
        if old is not None:
            yield Finding(
                place,
                f"is the run's source {old}: under another name, what the run consumed would be "
                "served again",
            )


def continued_order(
    fresh: SourceOrder, branch: BranchPoint, index: int, length: int, lengths: Sequence[int]
) -> tuple[SourceOrder, Position]:
    """A source's order after the run, and where it begins: that of the run where it fits, else
    one of what that left."""
    before, position = branch.plan.sources[index].order, branch.positions[index]
    before_length = branch.last_phase.seq_len
    grown = fresh.tokens > before.tokens
    same = (fresh.chunk, fresh.window) == (before.chunk, before.window)
    if same and not grown and all(before.chunk % each == 0 for each in lengths):
        if length == before_length:
            return before, position
        window = before.next_window(position, before_length)
        return before, before.convert(window, before_length, length)
    began_here = before.rest is not None and before.rest.position.epoch == position.epoch
    if grown and position.row == 0 and position.epoch > 0 and not began_here:
        # An epoch has just ended: what the dataset has grown by still belongs to that one.
        epoch = position.epoch - 1
        position = Position(epoch=epoch, row=before.rows(epoch, before_length))
    rest = Rest(order=before, position=position, length=before_length)
    return replace(fresh, rest=rest), Position(epoch=position.epoch)


def inherited_debts(branch: BranchPoint, plan: Plan) -> tuple[Fraction, ...]:
    """The tokens that each source of a plan after the run is still owed. What the sources that are
    weighed no more were owed is taken from those that were owed the other way, so that none is
    owed more than it was."""
    weights = zip(*(part.weights for phase in plan.phases for part in phase.stretches), strict=True)
    weighed = [any(parts) for parts in weights]
    names = [source.name for source in branch.plan.sources]
    before = dict(zip(names, branch.stream.debts(branch.row), strict=True))
    owed = [
        before.get(source.name, Fraction(0)) if drawn else Fraction(0)
        for source, drawn in zip(plan.sources, weighed, strict=True)
    ]
    total = sum(owed, Fraction(0))
    if total:
        side = sum(debt for debt in owed if debt * total > 0)
        owed = [debt * (1 - total / side) if debt * total > 0 else debt for debt in owed]
    return tuple(owed)


def replayed_shares(branch: BranchPoint, names: Sequence[str]) -> dict[str, Shares]:
    """By phase of the run, the shares of this mixture's sources when it is replayed."""
    return {
        phase: tuple(shares.get(name, Fraction(0)) for name in names)
        for phase, shares in branch.shares().items()
    }
