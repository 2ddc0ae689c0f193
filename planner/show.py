"""Plans for a person: layout, time and memory by part, and how they compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..console.errors import PlanError
from ..console.progress import format_bytes, format_seconds
from ..models.accounting.state import device_bytes
from ..models.config.options.recompute import Rule
from ..trainer.run.layout_plan import LayoutPlan, Planned
from .grid.grid import distinct_names
from .grid.settings import Settings
from .memory.sizes import format_sizes, merge_small
from .search.assemble import PARTS, build_phase_plan, peak_timeline, time_by_part
from .search.make import PhaseSearch
from .search.outcome import Candidate
from .search.priced_run import PricedRun

PROVED = 1e-6
"""Relative difference between price and bound below which a plan is proved best."""


def split_totals(candidate: Candidate) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds per step by part, and bytes at the peak by part."""
    _, problem, division, timelines = build_phase_plan(candidate)
    return time_by_part(problem, division), peak_timeline(timelines).parts


def describe_plan(plan: LayoutPlan) -> list[str]:
    """Return a plan file as lines for a person."""
    planned, predicted, layout = plan.planned, plan.predicted, plan.layout
    unit = "rows" if planned.module else "tokens"
    axes = {name: getattr(layout, name) for name in ("pp", "cp", "tp", "ep")}
    ranks = planned.gpus // (layout.pp * layout.tp)
    engine = plan.engine.for_ranks(ranks)
    degrees = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "dp alone"
    lines = [
        f"plan         {planned.module or 'model'} {planned.model}, {planned.gpus} ranks, "
        f"{planned.hardware}{'' if planned.executable else ' (`trainer run` refuses it)'}",
        f"layout       {degrees}, {engine.describe()}, {plan.micro_batch_tokens:,} {unit} a "
        f"micro-batch{f', {layout.schedule}' if layout.pp > 1 else ''}"
        f"{f', cuts {list(layout.cuts)}' if layout.cuts else ''}",
    ]
    for span in plan.layers:
        first, last = span.layers
        numbers = f"{first}" if first == last else f"{first}–{last}"
        options = ", weights stay gathered" if span.reshard is False else ""
        options += f", shards of {span.shard}" if span.shard else ""
        options += ", tensor ranks as context ranks" if span.sequence else ""
        lines.append(f"layers       {numbers}: recompute {_format_rule(span.recompute)}{options}")
    for phase in planned.phases:
        rate = phase.batch_tokens / phase.seconds / planned.gpus
        lines.append(
            f"phase        {phase.name}: {format_seconds(phase.seconds)} a step, {rate:,.0f} "
            f"{unit}/s on each device"
        )
    lines.append(
        f"time         {_describe_means(planned)}"
        f"{format_seconds(predicted.seconds)}{_describe_error(predicted.error)}"
        f"{_describe_gap(predicted.seconds, predicted.bound)}: "
        f"{_format_shares(predicted.by, predicted.seconds)}"
    )
    lines.append(
        f"memory       {format_bytes(predicted.memory)}: {format_sizes(predicted.memory_by)}"
    )
    if (measured := plan.measured) is not None:
        memory = f", {format_bytes(measured.memory)}" if measured.memory else ""
        lines.append(f"measured     {format_seconds(measured.seconds)}{memory}, on {measured.date}")
    if predicted.estimated:
        lines.append(
            f"estimated    {', '.join(predicted.estimated)}: no measured rate; priced by bytes and "
            "operations, which is optimistic"
        )
    if predicted.outside:
        lines.append(f"extrapolated {'; '.join(predicted.outside)}: the nearest rate answers")
    return lines


def compare_candidates(best: Candidate, candidate: Candidate) -> list[str]:
    """Return a candidate's layout, and the parts that take more or less time than in the best."""
    best_times, best_memory = split_totals(best)
    times, memory = split_totals(candidate)
    best_price, price = best.solution.price, candidate.solution.price
    name, best_name = distinct_names([candidate.grid, best.grid])
    lines = [
        f"{name} against the best, {best_name}",
        f"{format_seconds(price)} against {format_seconds(best_price)} of the best "
        f"({price / best_price - 1:+.1%}); "
        f"{format_bytes(device_bytes(memory))} against {format_bytes(device_bytes(best_memory))}",
    ]
    for part, meaning in PARTS.items():
        change = times.get(part, 0.0) - best_times.get(part, 0.0)
        if abs(change) > 0.002 * best_price:
            sign = "+" if change > 0 else "−"
            lines.append(f"    {part:<10}{sign}{format_seconds(abs(change))}  {meaning}")
    return lines


def describe_priced(priced: PricedRun) -> list[str]:
    """Return the price of a run's own layout, and what the best plan does otherwise."""
    first, *described = describe_plan(priced.plan)
    described.insert(0, first.replace("plan ", "run  ", 1))
    if priced.mfu is not None:
        described.append(f"MFU          {priced.mfu:.1%}")
    if priced.excess > 0:
        described.append(
            f"fits not     {format_bytes(round(priced.excess))} more than a plan may take"
        )
    if priced.best is not None:
        described += ["", *compare_candidates(priced.best.best, priced.candidate)]
    return described


def dump_priced(priced: PricedRun) -> dict[str, Any]:
    """Return the price of a run's own layout, for JSON."""
    seconds, memory = split_totals(priced.candidate)
    best = None if priced.best is None else priced.best.best
    return {
        "phase": priced.phase.name,
        "layout": priced.candidate.grid.settings(),
        "seconds": priced.seconds,
        "by": seconds,
        "tokens_per_second": priced.tokens_per_second,
        "mfu": priced.mfu,
        "memory": device_bytes(memory),
        "memory_by": memory,
        "fits": priced.excess <= 0,
        "estimated": list(priced.plan.predicted.estimated),
        "outside": list(priced.plan.predicted.outside),
        "error": priced.plan.predicted.error,
        "best_layout": None if best is None else best.grid.settings(),
        "best_seconds": None if best is None else best.solution.price,
    }


def dump_explained(
    explained: Sequence[tuple[PhaseSearch, Candidate | PlanError]], settings: Settings | None
) -> list[dict[str, Any]]:
    """Return for every phase the best plan with the settings, or why there is none, for JSON."""
    phases = []
    for phase_search, answer in explained:
        best = phase_search.best
        phase: dict[str, Any] = {
            "phase": phase_search.costs.phase.name,
            "asked": dict(settings or {}),
        }
        if isinstance(answer, Exception):
            phases.append({**phase, "error": str(answer)})
            continue
        times, memory = split_totals(answer)
        phases.append(
            {
                **phase,
                "layout": answer.grid.settings(),
                "seconds": answer.solution.price,
                "by": times,
                "best_seconds": best.solution.price,
                "best_by": split_totals(best)[0],
                "memory": device_bytes(memory),
                "memory_by": memory,
            }
        )
    return phases


def _describe_means(planned: Planned) -> str:
    """Return the mean step of each phase, and the length whose step follows; nothing for steps of
    equal rows."""
    if not planned.means:
        return ""
    means = ", ".join(f"{format_seconds(mean.seconds)} in {mean.phase}" for mean in planned.means)
    return f"a step on average: {means}; in {planned.phases[0].name} "


def _describe_gap(price: float, bound: float) -> str:
    gap = 1 - bound / price
    return "" if gap < PROVED else f" (at most {gap:.1%} above the best division)"


def _describe_error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.0%}"


def _format_shares(seconds_by_part: Mapping[str, float], price: float) -> str:
    """Return the parts of a step, largest first."""
    parts = merge_small(seconds_by_part, price)
    return ", ".join(f"{part} {seconds / price:.1%}" for part, seconds in parts.items())


def _format_rule(rule: Rule) -> str:
    return rule if isinstance(rule, str) else f"all but {', '.join(rule.save)}"
