"""A run's own layout, priced in each of its phases, and the best plans beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from ...dataplane.order.row_lengths import split_by_length
from ...dataplane.runlog import writer as lines
from ...trainer.folders.folder import RunFolder
from ...trainer.run.config import RunConfig
from ...trainer.run.layout_plan import LayoutPlan
from ..hardware import Hardware
from ..hardware.file import Experts
from ..prices.missing import check_figures
from .assemble import build_layout_plan
from .given_layout import price_run
from .make import PhaseSearch, PlanRequest, build_machine, merge_equal_phases
from .search import search
from .utilisation import compute_mfu

if TYPE_CHECKING:
    from ...dataplane.order.timeline import PhaseRows
    from ...models.config.config import ModelConfig
    from .outcome import Candidate


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """A run's own layout in a phase."""

    phase: PhaseRows
    candidate: Candidate
    plan: LayoutPlan
    """The layout as a plan would have it."""
    mfu: float | None
    """Model FLOPs utilisation, as runs record it; None without a peak in the file."""
    excess: float
    """Bytes beyond those that a plan may take; negative if it fits."""
    best: PhaseSearch | None
    """The best plans; None without a search, or if none fits."""

    @property
    def seconds(self) -> float:
        return self.candidate.solution.price

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.phase.seq_len * self.phase.batch_rows / self.seconds


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run's folder knows."""

    model: ModelConfig
    run: RunConfig
    phases: Sequence[PhaseRows]
    expert_load: float | None
    """Median of the busiest rank's tokens over their mean; None if no step has split experts."""


def read_stored_run(root: str) -> RunFacts:
    from ...trainer.run.stored import read_run

    folder = RunFolder(root)
    job = read_run(folder)
    metrics = lines.read(folder.metrics) if folder.metrics.exists() else ()
    loads = [entry["expert_load"] for entry in metrics if entry.get("expert_load")]
    return RunFacts(
        model=job.model,
        run=job.run,
        phases=split_by_length(job.plan),
        expert_load=median(loads) if loads else None,
    )


def replace_imbalance(hardware: Hardware, load: float) -> Hardware:
    """Return the cluster with the imbalance of experts that a run has measured."""
    experts = Experts(imbalance=max(1.0, load), source=hardware.file.device.source)
    return Hardware(replace(hardware.file, experts=experts), hardware.where)


def price_phases(request: PlanRequest, *, searches: bool) -> list[PricedRun]:
    """Price the run of a request as it is configured; with `searches`, find the best plans, too."""
    machine = build_machine(request)
    phase_costs = [request.costs(machine, phase) for phase in merge_equal_phases(request.phases)]
    check_figures(phase_costs, request.gpus)
    priced = []
    for costs in phase_costs:
        phase, best = costs.phase, None
        candidate = price_run(costs, request.run, request.gpus, request.budget)
        seconds = candidate.solution.price
        plan = build_layout_plan([costs], {phase.name: seconds}, candidate)
        plan = replace(plan, predicted=replace(plan.predicted, bound=seconds))  # it has no choice
        if searches:
            outcome = search(costs, request.gpus, request.budget)
            best = PhaseSearch(costs, outcome) if outcome.candidates else None
        priced.append(
            PricedRun(
                phase=phase,
                candidate=candidate,
                plan=plan,
                mfu=compute_mfu(request, phase.seq_len, phase.seq_len * phase.batch_rows / seconds),
                excess=plan.predicted.memory - request.budget,
                best=best,
            )
        )
    return priced


def resolve_run(run: RunConfig, device: Any) -> RunConfig:
    """Return the run with the cluster's kind of device, and its precision if it names none."""
    precision = run.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    return replace(run, device=device, precision=precision)
