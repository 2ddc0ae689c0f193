"""Tune a layout plan: measure the best layouts by prediction, and correct the figures behind them.

search ─► candidates ─► halving: trials ─► best plan ─► other phases and probes
                                  └──────► fit ◄─────────┘   ─► corrected hardware file
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ...console import config as reader
from ...console.errors import LayoutError, RunError
from ...trainer.folders.request_folder import write
from ...trainer.run.layout_plan import LayoutPlan, Measured, PlannedPhase, model_hash
from ..hardware import Hardware
from ..search.assemble import build_layout_plan
from ..search.search import search
from .correct import Correction, MeasuredStep, apply_correction, fit_correction
from .folder import TuneFolder
from .halving import HalvingResult, halve
from .prices import PlanPricer
from .probes import make_probes
from .trial import LayoutTrial, Runner, TrialResult


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """A plan to tune, and the limits of its trials."""

    plan: LayoutPlan
    plan_file: str
    pricer: PlanPricer
    hardware: Hardware
    memory: float
    trials: int
    steps: int
    words: Sequence[str] = ()
    """Arguments of `trainer run` that all trials share."""

    @property
    def phase(self) -> PlannedPhase:
        """The tuned phase: the plan's first."""
        return self.plan.planned.phases[0]

    def identity(self) -> dict[str, Any]:
        """Return all that decides the trials, as JSON."""
        return {
            "plan": reader.plain(replace(self.plan, measured=None)),
            "model": model_hash(self.pricer.model),
            "hardware": f"{self.hardware.file.name}#{self.hardware.digest}",
            "memory": self.memory,
            "trials": self.trials,
            "steps": self.steps,
            "words": list(self.words),
        }


@dataclass(frozen=True)
class LayoutRow:
    """A layout's measured or failed trial, beside its predictions."""

    plan: LayoutPlan
    phase: PlannedPhase
    result: TrialResult
    predicted: float
    """Seconds with the figures in the hardware file."""
    after: float
    """Seconds with the corrected figures."""
    memory: int
    """Predicted bytes on the fullest rank."""


@dataclass(frozen=True)
class TuneOutcome:
    """All trials, the best layout and the correction that follows."""

    rows: Sequence[LayoutRow]
    """Layouts for the tuned phase ordered by prediction, the best in later phases, then probes."""
    halving: HalvingResult
    correction: Correction
    folder: TuneFolder

    @property
    def best(self) -> LayoutRow:
        assert self.halving.best is not None
        return self.rows[self.halving.best]

    def errors(self) -> dict[str, float | None]:
        """Return the median relative error of predictions, before and after correction."""
        measured = [row for row in self.rows if row.result.seconds is not None]
        return {
            "before": _median_error((row.predicted, row.result.seconds) for row in measured),
            "after": _median_error((row.after, row.result.seconds) for row in measured),
        }


def check_request(request: TuneRequest, devices: int | None) -> None:
    """Raise if the plan is for another model or hardware, or for more than `devices` devices.

    `devices` is None if any number can be started.
    """
    planned, hardware = request.plan.planned, request.hardware
    model = model_hash(request.pricer.model)
    hardware_name = f"{hardware.file.name}#{hardware.digest}"
    differences = []
    if planned.model != model:
        differences.append(f"model: the plan has {planned.model}, --model {model}")
    if planned.hardware != hardware_name:
        differences.append(f"hardware: the plan has {planned.hardware}, --hardware {hardware_name}")
    if devices is not None and planned.gpus > devices:
        differences.append(f"processes: the plan has {planned.gpus}, this machine {devices} GPUs")
    if not planned.executable:
        differences.append("the plan is simulated: `trainer run` refuses it")
    if differences:
        raise LayoutError(
            f"{request.plan_file} was planned for another run",
            where="\n" + "\n".join(f"    {line}" for line in differences),
            hint="run `trainer plan` again for this model, hardware and machine",
        )


def tune(request: TuneRequest, folder: TuneFolder, runner: Runner) -> TuneOutcome:
    """Measure the best layouts by prediction; write the best plan and corrected figures.

    A killed tune continues: finished trials are not run again.
    """
    with folder.locked():
        candidates = folder.open(request.identity(), lambda: list(_candidates(request)))

        def measure_phase(
            name: str, number: int, plan: LayoutPlan, steps: int, phase: PlannedPhase
        ) -> TrialResult:
            def run(run_folder: Path) -> TrialResult:
                return runner(
                    LayoutTrial(
                        plan=plan,
                        file=folder.candidate(number),
                        folder=run_folder,
                        steps=steps,
                        seq_len=phase.seq_len,
                        batch_tokens=phase.batch_tokens,
                    )
                )

            return folder.once(name, run)

        def measure(candidate: int, number: int, steps: int) -> TrialResult:
            name = f"{candidate:02}-{number}"
            return measure_phase(name, candidate, candidates[candidate], steps, request.phase)

        halving = halve(len(candidates), request.steps, measure)
        if halving.best is None:
            raise _nothing_ran(halving)
        rows = [(plan, request.phase, halving.results[n]) for n, plan in enumerate(candidates)]
        best, steps = candidates[halving.best], request.steps << (halving.rounds - 1)
        for number, phase in enumerate(best.planned.phases[1:], start=1):
            name = f"{halving.best:02}-phase-{number}"
            rows.append((best, phase, measure_phase(name, halving.best, best, steps, phase)))
        budget = request.hardware.usable_memory * request.memory
        for number, plan in enumerate(
            make_probes(best, request.pricer, request.hardware, budget), start=len(candidates)
        ):
            folder.add(number, plan)
            [phase] = plan.planned.phases
            result = measure_phase(f"{number:02}-0", number, plan, request.steps, phase)
            rows.append((plan, phase, result))
        outcome = _correct(request, rows, halving, folder)
        _write(request, outcome)
        return outcome


def _candidates(request: TuneRequest) -> Iterator[LayoutPlan]:
    """Yield the plan, then the best different layouts by prediction, for the plan's phases."""
    yield replace(request.plan, measured=None)
    phase, hardware = request.phase, request.hardware
    costs = request.pricer.costs(hardware, phase.seq_len, phase.batch_tokens)
    budget = hardware.usable_memory * request.memory
    outcome = search(costs, request.plan.planned.gpus, budget, num_best=request.trials)
    plans = (
        build_layout_plan([costs], {"steps": candidate.solution.price}, candidate)
        for candidate in outcome.candidates
    )
    different = (plan for plan in plans if _runs_as(plan) != _runs_as(request.plan))
    for plan in islice(different, request.trials - 1):
        yield _with_phases(plan, request)


def _with_phases(plan: LayoutPlan, request: TuneRequest) -> LayoutPlan:
    """Extend a plan for the first phase to all phases that its layout can run."""
    ranks = plan.layout.tp * plan.layout.cp
    phases = []
    for phase in request.plan.planned.phases:
        if phase.seq_len % ranks == 0:
            size = phase.seq_len, phase.batch_tokens
            seconds, memory = request.pricer.price(plan, request.hardware, *size)
            phases.append(replace(phase, seconds=seconds, memory=memory))
    return replace(plan, planned=replace(plan.planned, phases=tuple(phases)))


def _runs_as(plan: LayoutPlan) -> tuple[Any, ...]:
    """Return what `trainer run` takes from a plan."""
    return plan.layout, plan.resolved_engine, plan.micro_batch_tokens, plan.rules


def _correct(
    request: TuneRequest,
    rows: Sequence[tuple[LayoutPlan, PlannedPhase, TrialResult]],
    halving: HalvingResult,
    folder: TuneFolder,
) -> TuneOutcome:
    """Fit and save the corrected hardware file; return the rows with predictions by both files."""
    pricer, hardware = request.pricer, request.hardware

    def price(plan: LayoutPlan, phase: PlannedPhase, hardware: Hardware) -> tuple[float, int]:
        return pricer.price(plan, hardware, phase.seq_len, phase.batch_tokens)

    def predict_seconds(plan: LayoutPlan, phase: PlannedPhase, hardware: Hardware) -> float:
        return price(plan, phase, hardware)[0]

    steps = [
        MeasuredStep(partial(predict_seconds, plan, phase), result.seconds, plan.engine.kind)
        for plan, phase, result in rows
        if result.seconds is not None
    ]
    correction = fit_correction(steps, hardware)
    today = date.today().isoformat()
    about = f"`trainer tune`, {len(steps)} layouts, model {request.plan.planned.model}"
    corrected = Hardware(apply_correction(hardware, correction, today, about), str(folder.hardware))
    corrected.save(folder.hardware)
    layout_rows = []
    for plan, phase, result in rows:
        seconds, memory = price(plan, phase, hardware)
        after = predict_seconds(plan, phase, corrected)
        layout_rows.append(LayoutRow(plan, phase, result, seconds, after, memory))
    return TuneOutcome(rows=layout_rows, halving=halving, correction=correction, folder=folder)


def _write(request: TuneRequest, outcome: TuneOutcome) -> None:
    """Write the best plan, with its measurement and a prediction by the corrected figures."""
    best = outcome.best
    assert best.result.seconds is not None
    measured = Measured(
        seconds=best.result.seconds,
        memory=best.result.memory,
        date=date.today().isoformat(),
    )
    plan = request.pricer.predict(best.plan, Hardware.load(outcome.folder.hardware))
    write(outcome.folder.plan, reader.dump(replace(plan, measured=measured)))


def _nothing_ran(halving: HalvingResult) -> RunError:
    """Return the error for a tune in which every trial failed."""
    first = halving.results[min(halving.results)]
    memory = sum(result.outcome == "memory" for result in halving.results.values())
    return RunError(
        f"none of {len(halving.results)} layouts ran; {memory} of them ran out of memory",
        where="\n" + first.error,
        hint="plan with a smaller --memory, or correct the memory in the hardware file"
        if memory
        else "the output of the first trial is above; its folder is in trials/",
    )


def _median_error(pairs: Any) -> float | None:
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return statistics.median(errors) if errors else None


def format_lines(outcome: TuneOutcome) -> list[str]:
    """Format the outcome for a person."""
    lines = [f"{'':>3}  predicted  measured  ratio  corrected  ratio  memory"]
    for number, row in enumerate(outcome.rows):
        mark = "*" if row is outcome.best else " "
        lines.append(f"{number:>2}{mark}  {_figures(row)}  {_name(row)}")
    best, errors = outcome.best, outcome.errors()
    first = outcome.rows[0].result.seconds
    assert best.result.seconds is not None
    gain = f", {first / best.result.seconds:.3f} times as fast as the plan" if first else ""
    lines += [
        f"best         layout {outcome.halving.best}: {best.result.seconds:.4g} s a step{gain}",
        f"prediction   off by {errors['before']:.1%} (median); corrected figures: "
        f"{errors['after']:.1%}",
        f"corrected    {', '.join(outcome.correction.words()) or 'nothing'}",
        f"written      {outcome.folder.plan}, {outcome.folder.hardware}",
    ]
    if outcome.halving.early:
        lines.append("stopped early: the best was far ahead of all others")
    return lines


def _figures(row: LayoutRow) -> str:
    if row.result.seconds is None:
        failure = "out of memory" if row.result.outcome == "memory" else "failed"
        return f"{row.predicted:>9.4g}  {failure:>43}"
    seconds, memory = row.result.seconds, row.result.memory
    ratio = f"{row.memory / memory:.2f}" if memory else "–"
    return (
        f"{row.predicted:>9.4g}  {seconds:>8.4g}  {row.predicted / seconds:>5.2f}  "
        f"{row.after:>9.4g}  {row.after / seconds:>5.2f}  {ratio:>6}"
    )


def _name(row: LayoutRow) -> str:
    layout = row.plan.layout
    dp = layout.data_parallel(row.plan.planned.gpus)
    axes = f"pp {layout.pp} × dp {dp} × cp {layout.cp} × tp {layout.tp}"
    rules = ", ".join(dict.fromkeys(str(span.recompute) for span in row.plan.layers))
    engine = row.plan.engine.for_ranks(dp * layout.cp).describe_with_layout(layout)
    return (
        f"{axes}, {row.plan.micro_batch_tokens:,} tokens, {engine}, "
        f"recompute {rules}, rows of {row.phase.seq_len:,}"
    )


def render_json(outcome: TuneOutcome) -> Mapping[str, Any]:
    """Return the outcome as `--json` prints it."""
    return {
        "best": outcome.halving.best,
        "plan": str(outcome.folder.plan),
        "hardware": str(outcome.folder.hardware),
        "stopped_early": outcome.halving.early,
        "errors": outcome.errors(),
        "factors": dict(outcome.correction.factors),
        "overhead": {
            "operation": outcome.correction.operation,
            "steps": dict(outcome.correction.steps),
        },
        "layouts": [
            {
                "layout": _name(row),
                "seq_len": row.phase.seq_len,
                "predicted": row.predicted,
                "corrected": row.after,
                "predicted_memory": row.memory,
                **vars(row.result),
            }
            for row in outcome.rows
        ],
    }
