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
from pathlib import Path
from typing import Any

from ...console import config as reader
from ...console.errors import LayoutError, RunError
from ...trainer.folders.request_folder import write
from ...trainer.run.layout_plan import LayoutPlan, Measured, PlannedPhase, model_hash
from ..hardware import Hardware
from ..search.assemble import build_layout_plan
from ..search.search import search
from .correct import Correction, Step, corrected, fit
from .folder import TuneFolder
from .halving import Ranked, halve
from .prices import Pricing
from .probes import probes
from .trial import Result, Runner, Trial


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request to tune a plan."""

    plan: LayoutPlan
    plan_file: str
    pricing: Pricing
    hardware: Hardware
    memory: float
    trials: int
    steps: int
    words: Sequence[str] = ()
    """Words of `trainer run` that all trials have."""

    @property
    def phase(self) -> PlannedPhase:
        """The phase that is tuned: the plan's first."""
        return self.plan.planned.phases[0]

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the trials."""
        return {
            "plan": reader.plain(replace(self.plan, measured=None)),
            "model": model_hash(self.pricing.model),
            "hardware": f"{self.hardware.file.name}#{self.hardware.digest}",
            "memory": self.memory,
            "trials": self.trials,
            "steps": self.steps,
            "words": list(self.words),
        }


@dataclass(frozen=True)
class Row:
    """A measured or failed layout."""

    plan: LayoutPlan
    phase: PlannedPhase
    result: Result
    predicted: float
    """By the figures of the hardware file."""
    after: float
    """By the corrected figures."""
    memory: int
    """Predicted bytes of the fullest rank."""


@dataclass(frozen=True)
class Outcome:
    rows: Sequence[Row]
    """Layouts of the tuned phase in the order of prediction, then the other phases of the best, and
    the runs that separate the figures (probes.py)."""
    ranked: Ranked
    correction: Correction
    folder: TuneFolder

    @property
    def best(self) -> Row:
        assert self.ranked.best is not None
        return self.rows[self.ranked.best]

    def errors(self) -> dict[str, float | None]:
        """Return the median of the relative errors of all predictions, before and after."""
        measured = [row for row in self.rows if row.result.seconds is not None]
        return {
            "before": _median_error((row.predicted, row.result.seconds) for row in measured),
            "after": _median_error((row.after, row.result.seconds) for row in measured),
        }


def check(question: Question, devices: int | None) -> None:
    """Raise if the plan is for another model or hardware, or for more devices than there are;
    `devices` is None where their number is free."""
    planned, hardware = question.plan.planned, question.hardware
    own = model_hash(question.pricing.model)
    named = f"{hardware.file.name}#{hardware.digest}"
    different = []
    if planned.model != own:
        different.append(f"model: the plan has {planned.model}, --model {own}")
    if planned.hardware != named:
        different.append(f"hardware: the plan has {planned.hardware}, --hardware {named}")
    if devices is not None and planned.gpus > devices:
        different.append(f"processes: the plan has {planned.gpus}, this machine {devices} GPUs")
    if not planned.executable:
        different.append("the plan is simulated: `trainer run` refuses it")
    if different:
        raise LayoutError(
            f"{question.plan_file} was planned for another run",
            where="\n" + "\n".join(f"    {line}" for line in different),
            hint="run `trainer plan` again for this model, hardware and machine",
        )


def tune(question: Question, folder: TuneFolder, runner: Runner) -> Outcome:
    """Measure the best layouts by prediction, and write the best plan and corrected figures.

    A tune that was killed continues: finished trials are not run again.
    """
    with folder.locked():
        candidates = folder.open(question.identity(), lambda: list(_candidates(question)))
        phase = question.phase

        def trial(name: str, plan: LayoutPlan, file: int, steps: int, at: PlannedPhase) -> Result:
            return _trial(folder, runner, name, plan, folder.candidate(file), steps, at)

        def measure(candidate: int, number: int, steps: int) -> Result:
            name = f"{candidate:02}-{number}"
            return trial(name, candidates[candidate], candidate, steps, phase)

        ranked = halve(len(candidates), question.steps, measure)
        if ranked.best is None:
            raise _nothing_ran(ranked)
        rows = [(plan, phase, ranked.results[n]) for n, plan in enumerate(candidates)]
        best, steps = candidates[ranked.best], question.steps << (ranked.rounds - 1)
        for number, other in enumerate(best.planned.phases[1:], start=1):
            name = f"{ranked.best:02}-phase-{number}"
            rows.append((best, other, trial(name, best, ranked.best, steps, other)))
        budget = question.hardware.usable_memory * question.memory
        for number, plan in enumerate(
            probes(best, question.pricing, question.hardware, budget), start=len(candidates)
        ):
            folder.add(number, plan)
            [other] = plan.planned.phases
            rows.append((plan, other, trial(f"{number:02}-0", plan, number, question.steps, other)))
        outcome = _outcome(question, rows, ranked, folder)
        _write(question, outcome)
        return outcome


def _candidates(question: Question) -> Iterator[LayoutPlan]:
    """Yield the plan, then the best other layouts by prediction, each for the plan's phases."""
    yield replace(question.plan, measured=None)
    phase, hardware = question.phase, question.hardware
    costs = question.pricing.costs(hardware, phase.seq_len, phase.batch_tokens)
    budget = hardware.usable_memory * question.memory
    found = search(costs, question.plan.planned.gpus, budget, num_best=question.trials)
    others = 0
    for candidate in found.candidates:
        made = build_layout_plan([costs], {"steps": candidate.solution.price}, candidate)
        if _runs_as(made) != _runs_as(question.plan) and others < question.trials - 1:
            others += 1
            yield _with_phases(made, question)


def _with_phases(plan: LayoutPlan, question: Question) -> LayoutPlan:
    """Return a plan of the first phase as one for each phase that its layout can run."""
    ranks = plan.layout.tp * plan.layout.cp
    phases = []
    for phase in question.plan.planned.phases:
        if phase.seq_len % ranks == 0:
            size = phase.seq_len, phase.batch_tokens
            seconds, memory = question.pricing.price(plan, question.hardware, *size)
            phases.append(replace(phase, seconds=seconds, memory=memory))
    return replace(plan, planned=replace(plan.planned, phases=tuple(phases)))


def _runs_as(plan: LayoutPlan) -> tuple[Any, ...]:
    return plan.layout, plan.engine_of_layers, plan.micro_batch_tokens, plan.rules


def _trial(
    folder: TuneFolder,
    runner: Runner,
    name: str,
    plan: LayoutPlan,
    file: Path,
    steps: int,
    phase: PlannedPhase,
) -> Result:
    def run(place: Any) -> Result:
        return runner(
            Trial(
                plan=plan,
                file=file,
                folder=place,
                steps=steps,
                seq_len=phase.seq_len,
                batch_tokens=phase.batch_tokens,
            )
        )

    return folder.once(name, run)


def _outcome(
    question: Question,
    rows: Sequence[tuple[LayoutPlan, PlannedPhase, Result]],
    ranked: Ranked,
    folder: TuneFolder,
) -> Outcome:
    pricing, hardware = question.pricing, question.hardware

    def price(plan: LayoutPlan, phase: PlannedPhase, by: Hardware) -> tuple[float, int]:
        return pricing.price(plan, by, phase.seq_len, phase.batch_tokens)

    def seconds_of(plan: LayoutPlan, phase: PlannedPhase, by: Hardware) -> float:
        return price(plan, phase, by)[0]

    steps = [
        Step(partial(seconds_of, plan, phase), result.seconds, plan.engine.kind)
        for plan, phase, result in rows
        if result.seconds is not None
    ]
    correction = fit(steps, hardware)
    today = date.today().isoformat()
    about = f"`trainer tune`, {len(steps)} layouts, model {question.plan.planned.model}"
    after = Hardware(corrected(hardware, correction, today, about), str(folder.hardware))
    after.save(folder.hardware)
    found = []
    for plan, phase, result in rows:
        seconds, memory = price(plan, phase, hardware)
        found.append(Row(plan, phase, result, seconds, price(plan, phase, after)[0], memory))
    return Outcome(rows=found, ranked=ranked, correction=correction, folder=folder)


def _write(question: Question, outcome: Outcome) -> None:
    """Write the best plan, with its measurement and the prediction by the corrected figures."""
    best = outcome.best
    assert best.result.seconds is not None
    measured = Measured(
        seconds=best.result.seconds,
        memory=best.result.memory,
        date=date.today().isoformat(),
    )
    plan = question.pricing.predicted(best.plan, Hardware.load(outcome.folder.hardware))
    write(outcome.folder.plan, reader.dump(replace(plan, measured=measured)))


def _nothing_ran(ranked: Ranked) -> RunError:
    """Return the error of a tune whose every trial failed."""
    first = ranked.results[min(ranked.results)]
    memory = sum(result.outcome == "memory" for result in ranked.results.values())
    return RunError(
        f"none of {len(ranked.results)} layouts ran; {memory} of them ran out of memory",
        where="\n" + first.error,
        hint="plan with a smaller --memory, or correct the memory in the hardware file"
        if memory
        else "the output of the first trial is above; its folder is in trials/",
    )


def _median_error(pairs: Any) -> float | None:
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return statistics.median(errors) if errors else None


def lines(outcome: Outcome) -> list[str]:
    """Format the result for a person."""
    text = [f"{'':>3}  predicted  measured  ratio  corrected  ratio  memory"]
    for number, row in enumerate(outcome.rows):
        mark = "*" if row is outcome.best else " "
        text.append(f"{number:>2}{mark}  {_figures(row)}  {_name(row)}")
    best, errors = outcome.best, outcome.errors()
    first = outcome.rows[0].result.seconds
    assert best.result.seconds is not None
    gain = f", {first / best.result.seconds:.3f} times as fast as the plan" if first else ""
    text += [
        f"best         layout {outcome.ranked.best}: {best.result.seconds:.4g} s a step{gain}",
        f"prediction   off by {errors['before']:.1%} (median); corrected figures: "
        f"{errors['after']:.1%}",
        f"corrected    {', '.join(outcome.correction.words()) or 'nothing'}",
        f"written      {outcome.folder.plan}, {outcome.folder.hardware}",
    ]
    if outcome.ranked.early:
        text.append("stopped early: the best was far ahead of all others")
    return text


def _figures(row: Row) -> str:
    if row.result.seconds is None:
        what = "out of memory" if row.result.outcome == "memory" else "failed"
        return f"{row.predicted:>9.4g}  {what:>43}"
    seconds, memory = row.result.seconds, row.result.memory
    ratio = f"{row.memory / memory:.2f}" if memory else "–"
    return (
        f"{row.predicted:>9.4g}  {seconds:>8.4g}  {row.predicted / seconds:>5.2f}  "
        f"{row.after:>9.4g}  {row.after / seconds:>5.2f}  {ratio:>6}"
    )


def _name(row: Row) -> str:
    layout = row.plan.layout
    dp = layout.data_parallel(row.plan.planned.gpus)
    axes = f"pp {layout.pp} × dp {dp} × cp {layout.cp} × tp {layout.tp}"
    rules = ", ".join(dict.fromkeys(str(span.recompute) for span in row.plan.layers))
    return (
        f"{axes}, {row.plan.micro_batch_tokens:,} tokens, {row.plan.engine.describe_in(layout)}, "
        f"recompute {rules}, rows of {row.phase.seq_len:,}"
    )


def as_json(outcome: Outcome) -> Mapping[str, Any]:
    return {
        "best": outcome.ranked.best,
        "plan": str(outcome.folder.plan),
        "hardware": str(outcome.folder.hardware),
        "stopped_early": outcome.ranked.early,
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
