"""Make plans for a request: the best for every phase, and the best that serves all phases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...console.errors import MisuseError, PlanError
from ...console.explain import hint as nearest_hint
from ...console.progress import format_bytes
from ...dataplane.order.timeline import PhaseRows
from ...models.config.options.precision import PRECISIONS
from ...trainer.engines import ENGINES
from ...trainer.layout.schedules import SCHEDULES, refusal_reason
from ...trainer.run.config import RunConfig
from ...trainer.run.layout_plan import LayoutPlan
from ..division.problem import price_division
from ..grid.grid import list_settings, make_grid
from ..grid.settings import Settings
from ..hardware import Hardware
from ..memory.sizes import format_sizes
from ..modules.costs import ModuleCosts
from ..modules.model import TracedModules
from ..prices.layers import Costs
from ..prices.machine import Machine
from ..prices.missing import check_figures, refuse_offload
from .assemble import (
    PhasePlan,
    build_layout_plan,
    build_phase_plan,
    match_choices,
    peak_timeline,
)
from .outcome import Candidate, SearchOutcome
from .refused import explain_refusal
from .search import search

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig


IDEAS = 10
"""Ideas whose best plans are shown."""
TABLES: Mapping[str, Mapping[str, Any]] = {"schedule": SCHEDULES, "engine": ENGINES}
"""Known values of settings that are names."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for plans: the model, the phases and the cluster."""

    model: ModelConfig
    run: RunConfig
    hardware: Hardware
    gpus: int
    phases: Sequence[PhaseRows]
    memory: float = 0.9
    """Fraction of usable memory per device."""
    roofline: bool = False
    simulate: bool = False
    modules: TracedModules | None = None
    """Another program's modules, instead of a model."""

    def costs(self, machine: Machine, phase: PhaseRows) -> Costs:
        """Return a phase's costs on the cluster."""
        if self.modules is not None:
            return ModuleCosts(self.modules, self.run, machine, phase)
        return Costs(self.model, self.run, machine, phase)

    @property
    def budget(self) -> float:
        """Bytes per device that a plan may take."""
        return self.hardware.usable_memory * self.memory


def uniform_phase(seq_len: int, rows: int) -> PhaseRows:
    """Return a phase with one step of `rows` rows: a plan depends on length and batch alone."""
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
class PhaseSearch:
    """A phase's search, which has candidates."""

    costs: Costs
    outcome: SearchOutcome

    @property
    def best(self) -> Candidate:
        """The candidate with the shortest step."""
        return self.outcome.candidates[0]


@dataclass(frozen=True)
class Plans:
    """Answer to a request."""

    request: PlanRequest
    phases: Sequence[PhaseSearch]
    """Searches by phase; phases with equal length and batch are one."""
    best: LayoutPlan | None
    """Plan that serves all phases; None if every phase needs its own."""
    by_phase: Sequence[LayoutPlan]
    """Best plan for every phase."""
    best_in_phases: Sequence[PhasePlan] = ()
    """`best` as every phase runs it; empty for a single phase."""


def make_plans(request: PlanRequest) -> Plans:
    """Search the best plans. Raise PlanError if a phase has none."""
    machine = build_machine(request)
    phase_costs = [request.costs(machine, phase) for phase in merge_equal_phases(request.phases)]
    check_figures(phase_costs, request.gpus)
    phases = []
    for costs in phase_costs:
        outcome = search(
            costs, request.gpus, request.budget, num_ideas=IDEAS, simulate=request.simulate
        )
        if not outcome.candidates:
            raise build_no_plan_error(request, costs, outcome)
        phases.append(PhaseSearch(costs, outcome))
    by_phase = [
        build_layout_plan(
            [phase.costs], {phase.costs.phase.name: phase.best.solution.price}, phase.best
        )
        for phase in phases
    ]
    if len(phases) == 1:
        return Plans(request, phases, by_phase[0], by_phase)
    best, best_in_phases = find_joint_plan(request, phases)
    return Plans(request, phases, best, by_phase, best_in_phases)


def build_machine(request: PlanRequest) -> Machine:
    """Return the cluster's prices in the run's precision."""
    run = request.run
    fp8 = run.fp8 or PRECISIONS[run.precision].fp8
    if fp8 is not None and fp8.matrices != "all":
        raise PlanError(
            f"fp8.matrices={fp8.matrices} cannot be planned: products are priced by their sizes, "
            "not by their operators",
            hint="plan with fp8.matrices=all (optimistic) or precision=bf16 (pessimistic)",
        )
    return Machine(request.hardware, run.precision, fp8=fp8, roofline=request.roofline)


def merge_equal_phases(phases: Sequence[PhaseRows]) -> list[PhaseRows]:
    """Merge phases with equal length and batch: the first stands for all, with all their rows."""
    merged: dict[tuple[int, int], PhaseRows] = {}
    for phase in phases:
        key = phase.seq_len, phase.batch_rows
        first = merged.get(key)
        merged[key] = replace(first, rows=first.rows + phase.rows) if first else phase
    return list(merged.values())


def find_joint_plan(
    request: PlanRequest, phases: Sequence[PhaseSearch]
) -> tuple[LayoutPlan | None, Sequence[PhasePlan]]:
    """Return the cheapest candidate that can run every phase, with its plan in each phase; None if
    no candidate can."""
    best: tuple[float, PhaseSearch, Candidate, list[PhasePlan]] | None = None
    for source in phases:
        for candidate in source.outcome.candidates:
            phase_plans = list(_run_in_phases(request, phases, source, candidate))
            if len(phase_plans) < len(phases):
                continue
            total = sum(
                phase_plan.plan.price * phase.costs.phase.steps
                for phase_plan, phase in zip(phase_plans, phases, strict=True)
            )
            if best is None or total < best[0]:
                best = total, source, candidate, phase_plans
    if best is None:
        return None, ()
    _, source, candidate, phase_plans = best
    costs = [source.costs, *(phase.costs for phase in phases if phase is not source)]
    names = [phase.costs.phase.name for phase in phases]
    seconds = {name: plan.plan.price for name, plan in zip(names, phase_plans, strict=True)}
    timelines = {name: plan.timelines for name, plan in zip(names, phase_plans, strict=True)}
    return build_layout_plan(costs, seconds, candidate, timelines), phase_plans


def _run_in_phases(
    request: PlanRequest, phases: Sequence[PhaseSearch], source: PhaseSearch, candidate: Candidate
) -> Iterator[PhasePlan]:
    """Yield the candidate's plan in every phase that it can run."""
    layout = candidate.grid.layout
    tokens = candidate.grid.shape.rows * source.costs.phase.seq_len // layout.cp
    choices = candidate.solution.choices
    for phase_search in phases:
        costs, phase = phase_search.costs, phase_search.costs.phase
        has_rows = layout.data_parallel(request.gpus) <= phase.whole.batch_rows
        if phase.seq_len % (layout.tp * layout.cp) or not has_rows:
            continue
        grid = make_grid(layout, candidate.grid.engine, tokens, request.gpus, phase)
        problem = costs.problem(grid, request.budget, simulate=request.simulate, all_choices=True)
        cuts, layer_plans = candidate.solution.cuts, [choice.name for choice in choices]
        timelines = costs.timelines(grid, cuts, layer_plans)
        if peak_timeline(timelines).highest <= request.budget:
            division = price_division(problem, cuts, match_choices(problem, choices))
            yield PhasePlan(grid, problem, division, timelines)


def build_no_plan_error(
    request: PlanRequest, costs: Costs, outcome: SearchOutcome, settings: Settings | None = None
) -> PlanError:
    """Return an error that names what the nearest layout exceeds."""
    phase = costs.phase
    where = f"phase {phase.name}: {phase.seq_len:,} tokens a row"
    clause = f" with {', '.join(f'{k}={v}' for k, v in settings.items())}" if settings else ""
    if not outcome.grids:
        reasons = explain_refusal(costs, request.gpus, outcome, settings or {})
        return PlanError(
            f"no layout of {request.gpus} devices{clause} can run this model ({where})",
            where="".join(f"\n    {reason}" for reason in reasons),
            hint="change the number of devices, or what is asked for",
        )
    nearest = outcome.nearest
    assert nearest is not None, "a search without candidates has a nearest plan"
    timeline = peak_timeline(nearest.timelines)
    stage = nearest.timelines.index(timeline)
    on_stage = f" on stage {stage}" if nearest.grid.layout.pp > 1 else ""
    excess = format_bytes(round(timeline.highest - request.budget))
    return PlanError(
        f"no layout{clause} fits into {format_bytes(round(request.budget))} of each of "
        f"{request.gpus} devices ({where}); {outcome.grids} were searched",
        where=f"\n    the nearest needs {format_bytes(timeline.highest)}{on_stage}, {excess} too "
        f"much: {nearest.grid.name()}\n    {format_sizes(timeline.parts)}\n    "
        f"{_count_reasons(outcome, refuse_offload(costs))}",
        hint="use more devices, devices with more memory, or a larger --memory",
    )


def _count_reasons(outcome: SearchOutcome, offload_refusal: str | None) -> str:
    """Return why no layout fits, with a number of layouts per reason."""
    reasons = "the state alone exceeds it in each of them"
    if counted := outcome.grids - outcome.states:
        reasons = (
            f"the state alone exceeds it in {outcome.states} of them, and in {counted} the least "
            "bytes of all divisions and recompute rules do"
        )
    if offload_refusal is None:
        return f"{reasons}, and with the optimizer in host memory, too"
    return f"{reasons}. Offload was not tried: {offload_refusal}"


def explain(plans: Plans, settings: Settings) -> list[tuple[PhaseSearch, Candidate | PlanError]]:
    """Return the best plan with these settings for every phase, or the error that says why there is
    none."""
    request = plans.request
    explained: list[tuple[PhaseSearch, Candidate | PlanError]] = []
    for phase in plans.phases:
        outcome = search(
            phase.costs,
            request.gpus,
            request.budget,
            settings=settings,
            num_best=1,
            simulate=request.simulate,
        )
        if outcome.candidates:
            explained.append((phase, outcome.candidates[0]))
        else:
            error = build_no_plan_error(request, phase.costs, outcome, settings)
            explained.append((phase, error))
    return explained


def plans_to_simulate(
    plans: Plans,
    explained: Sequence[tuple[PhaseSearch, Candidate | PlanError]],
    settings_text: str | None,
) -> list[tuple[str, PhaseSearch, PhasePlan]]:
    """Return titled plans: the best for each phase, the joint plan in each phase where it differs,
    and the plans that --explain found with `settings_text`."""
    best = [
        (f"phase {phase.costs.phase.name}", phase, build_phase_plan(phase.best))
        for phase in plans.phases
    ]
    joint = [
        (f"{title} with the plan of all phases", phase, joint_plan)
        for (title, phase, best_plan), joint_plan in zip(best, plans.best_in_phases, strict=False)
        if joint_plan.key != best_plan.key
    ]
    with_settings = [
        (f"phase {phase.costs.phase.name} with {settings_text}", phase, build_phase_plan(candidate))
        for phase, candidate in explained
        if not isinstance(candidate, Exception)
    ]
    return [*best, *joint, *with_settings]


def parse_settings(text: str) -> Mapping[str, Any]:
    """Return the settings in text such as `pp=1,tp=8`."""
    requested: dict[str, Any] = {}
    known = list_settings()
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals:
            problem = f"`{word}` is not SETTING=VALUE."
        elif name not in known:
            problem = f"there is no setting `{name}`{nearest_hint(name, known)}"
        elif name in TABLES and value not in TABLES[name]:
            problem = _describe_unknown(name, value)
        else:
            requested[name] = int(value) if value.isdecimal() else value
            continue
        raise MisuseError(f"--explain {text}: {problem}", hint=f"settings are {', '.join(known)}")
    return requested


def _describe_unknown(name: str, value: str) -> str:
    """Return why a table of names lacks a value."""
    if name == "schedule" and (reason := refusal_reason(value)) is not None:
        return f"{reason}."
    table = TABLES[name]
    suggestion = nearest_hint(value, table)
    return f"there is no {name} `{value}`{suggestion} Known: {', '.join(table)}."
