"""Plans of a request: one for each phase, and one that serves all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...console.errors import MisuseError, PlanError
from ...console.progress import as_bytes
from ...dataplane.order.timeline import PhaseRows
from ...models.config.options.precision import PRECISIONS
from ...trainer.run.config import RunConfig
from ...trainer.run.layout_plan import LayoutPlan
from ..division.assigned import assigned
from ..grid.grid import make_grid, settings
from ..grid.wanted import Wanted
from ..hardware import Hardware
from ..modules.costs import ModuleCosts
from ..modules.model import Traced
from ..prices.layers import Costs
from ..prices.machine import Machine
from .assemble import InPhase, fullest, in_phase, plan_of, same_choices
from .outcome import Candidate, Outcome
from .proof.nearest import nearest
from .proof.refused import reasons
from .search import search

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request for plans: the model, the phases and the cluster."""

    model: ModelConfig
    run: RunConfig
    hardware: Hardware
    gpus: int
    phases: Sequence[PhaseRows]
    memory: float = 0.9
    """Fraction of a device's usable memory."""
    roofline: bool = False
    simulate: bool = False
    modules: Traced | None = None
    """Modules that are not ours, instead of a model."""

    def costs(self, machine: Machine, phase: PhaseRows) -> Costs:
        if self.modules is not None:
            return ModuleCosts(self.modules, self.run, machine, phase)
        return Costs(self.model, self.run, machine, phase)

    @property
    def budget(self) -> float:
        return self.hardware.usable_memory * self.memory


def uniform_phase(seq_len: int, rows: int) -> PhaseRows:
    """Return a phase of one step of these rows: a plan depends on its length and batch alone."""
    return PhaseRows(
        name="steps",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=rows,
        seq_len=seq_len,
        batch_rows=rows,
    )


@dataclass(frozen=True)
class PhasePlans:
    """Plans of one phase."""

    costs: Costs
    outcome: Outcome

    @property
    def best(self) -> Candidate:
        return self.outcome.candidates[0]


@dataclass(frozen=True)
class Plans:
    question: Question
    phases: Sequence[PhasePlans]
    """Phases of different lengths or batches."""
    best: LayoutPlan | None
    """The plan that serves all phases; None if each needs one of its own."""
    each: Sequence[LayoutPlan]
    """The best plan of each phase."""
    in_phases: Sequence[InPhase] = ()
    """`best` in each of several phases."""


def make_plans(question: Question) -> Plans:
    """Search the best plans. Raise PlanError if a phase has none."""
    machine = machine_of(question)
    phases = []
    for phase in different(question.phases):
        costs = question.costs(machine, phase)
        outcome = search(costs, question.gpus, question.budget, simulate=question.simulate)
        if not outcome.candidates:
            raise no_plan(question, costs, outcome)
        phases.append(PhasePlans(costs, outcome))
    each = [
        plan_of([own.costs], {own.costs.phase.name: own.best.solution.price}, own.best)
        for own in phases
    ]
    if len(phases) == 1:
        return Plans(question, phases, each[0], each)
    best, in_phases = joint(question, phases)
    return Plans(question, phases, best, each, in_phases)


def machine_of(question: Question) -> Machine:
    """Return the costs of the cluster in the run's precision."""
    run = question.run
    fp8 = run.fp8 or PRECISIONS[run.precision].fp8
    if fp8 is not None and fp8.matrices != "all":
        raise PlanError(
            f"fp8.matrices={fp8.matrices} cannot be planned: products are priced by their sizes, "
            "not by their operators",
            hint="plan with fp8.matrices=all (optimistic) or precision=bf16 (pessimistic)",
        )
    return Machine(question.hardware, run.precision, fp8=fp8, roofline=question.roofline)


def different(phases: Sequence[PhaseRows]) -> list[PhaseRows]:
    """Return the first phase of each length and batch, with the steps of all of them."""
    found: dict[tuple[int, int], PhaseRows] = {}
    for phase in phases:
        key = phase.seq_len, phase.batch_rows
        known = found.get(key)
        found[key] = replace(known, rows=known.rows + phase.rows) if known else phase
    return list(found.values())


def joint(
    question: Question, phases: Sequence[PhasePlans]
) -> tuple[LayoutPlan | None, Sequence[InPhase]]:
    """Return the cheapest of all phases' plans that runs every phase, and as it runs each of them;
    None if no plan does."""
    best: tuple[float, PhasePlans, Candidate, list[InPhase]] | None = None
    for own in phases:
        for candidate in own.outcome.candidates:
            made = list(_in_phases(question, phases, own, candidate))
            if len(made) < len(phases):
                continue
            total = sum(
                each.plan.price * other.costs.phase.steps
                for each, other in zip(made, phases, strict=True)
            )
            if best is None or total < best[0]:
                best = total, own, candidate, made
    if best is None:
        return None, ()
    _, own, candidate, made = best
    costs = [own.costs, *(p.costs for p in phases if p is not own)]
    times = {p.costs.phase.name: each.plan.price for p, each in zip(phases, made, strict=True)}
    timelines = {p.costs.phase.name: each.timelines for p, each in zip(phases, made, strict=True)}
    return plan_of(costs, times, candidate, timelines), made


def _in_phases(
    question: Question, phases: Sequence[PhasePlans], own: PhasePlans, candidate: Candidate
) -> Iterator[InPhase]:
    """Yield the plan of one phase in each phase that it runs."""
    layout = candidate.grid.layout
    tokens = candidate.grid.shape.rows * own.costs.phase.seq_len // layout.cp
    choices = candidate.choices
    for other in phases:
        phase = other.costs.phase
        if phase.seq_len % (layout.tp * layout.cp):
            continue
        grid = make_grid(layout, candidate.grid.engine, tokens, question.gpus, phase)
        problem = other.costs.problem(
            grid, question.budget, simulate=question.simulate, all_choices=True
        )
        cuts, ways = candidate.solution.cuts, [choice.name for choice in choices]
        timelines = other.costs.timelines(grid, cuts, ways)
        if fullest(timelines).highest <= question.budget:
            found = assigned(problem, cuts, same_choices(problem, choices))
            yield InPhase(grid, problem, found, timelines)


def no_plan(
    question: Question, costs: Costs, outcome: Outcome, wanted: Wanted | None = None
) -> PlanError:
    """Return the error that names what the nearest layout exceeds."""
    phase = costs.phase
    where = f"phase {phase.name}: {phase.seq_len:,} tokens a row"
    which = f" with {', '.join(f'{k}={v}' for k, v in wanted.items())}" if wanted else ""
    if not outcome.grids:
        found = reasons(costs, question.gpus, outcome, wanted or {})
        return PlanError(
            f"no layout of {question.gpus} devices{which} can run this model ({where})",
            where="".join(f"\n    {reason}" for reason in found),
            hint="change the number of devices, or what is asked for",
        )
    by_state = outcome.states == outcome.grids
    least = nearest(costs, question.gpus, question.budget, wanted, by_state=by_state)
    on = f" on stage {least.stage}" if least.grid.layout.pp > 1 else ""
    parts = ", ".join(f"{name} {as_bytes(size)}" for name, size in least.parts.items())
    over = as_bytes(round(least.bytes - question.budget))
    return PlanError(
        f"no layout{which} fits into {as_bytes(round(question.budget))} of each of "
        f"{question.gpus} devices ({where}); {outcome.grids} were searched",
        where=f"\n    the nearest needs {as_bytes(least.bytes)}{on}, {over} too much: "
        f"{least.grid.name()}\n    {parts}\n    {_proof(outcome)}",
        hint="use more devices, devices with more memory, or a larger --memory",
    )


def _proof(outcome: Outcome) -> str:
    """Return how many layouts exceed the budget by what."""
    if undecided := outcome.undecided:
        return f"not proven for {len(undecided)} of them, such as {undecided[0].name()}"
    counted = outcome.grids - outcome.states
    if not counted:
        return "proven: in each of them the state alone exceeds it"
    return (
        f"proven: the state alone exceeds it in {outcome.states} of them, and in {counted} the "
        "least memory of all stages and recompute rules does"
    )


def explain(plans: Plans, wanted: Wanted) -> list[tuple[PhasePlans, Candidate | PlanError]]:
    """Return, for each phase, the best plan with these settings, or why there is none."""
    question = plans.question
    found: list[tuple[PhasePlans, Candidate | PlanError]] = []
    for own in plans.phases:
        costs = own.costs
        outcome = search(
            costs,
            question.gpus,
            question.budget,
            wanted=wanted,
            best=1,
            simulate=question.simulate,
        )
        if not outcome.candidates:
            found.append((own, no_plan(question, costs, outcome, wanted)))
            continue
        found.append((own, outcome.candidates[0]))
    return found


def drawn(
    plans: Plans, explained: Sequence[tuple[PhasePlans, Candidate | PlanError]], asked: str | None
) -> list[tuple[str, PhasePlans, InPhase]]:
    """Return the plans that are simulated, with their titles: the best of each phase, the one that
    serves all phases, and those that were `asked` for by --explain."""
    best = [(f"phase {own.costs.phase.name}", own, in_phase(own.best)) for own in plans.phases]
    serving = [
        (f"{title} with the plan of all phases", own, made)
        for (title, own, alone), made in zip(best, plans.in_phases, strict=False)
        if made.runs_as != alone.runs_as
    ]
    others = [
        (f"phase {own.costs.phase.name} with {asked}", own, in_phase(other))
        for own, other in explained
        if not isinstance(other, Exception)
    ]
    return [*best, *serving, *others]


def parse_wanted(text: str) -> Mapping[str, Any]:
    """Return the settings of `pp=1,tp=8`."""
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name not in settings():
            raise MisuseError(
                f"--explain {text}: `{word}` is not SETTING=VALUE",
                hint=f"settings are {', '.join(settings())}",
            )
        found[name] = int(value) if value.isdecimal() else value
    return found
