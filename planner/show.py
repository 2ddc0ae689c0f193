"""Tables of plans for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..console.errors import PlanError
from ..console.progress import format_bytes
from ..models.accounting.state import device_bytes
from ..models.config.options.recompute import Rule
from ..trainer.run.layout_plan import LayoutPlan
from .grid.grid import distinct_names
from .grid.settings import Settings
from .memory.model_parts import count_threads
from .search.assemble import PARTS, build_phase_plan, peak_timeline, time_by_part
from .search.make import PhaseSearch, Plans
from .search.outcome import Candidate

PROVED = 1e-6
"""Relative difference between price and bound below which a plan is proved best."""


def lines_of(plans: Plans) -> list[str]:
    """Return the best plans of each phase, and the plan that serves all."""
    text = []
    for own in plans.phases:
        text += [*_phase(own), *_table(own), ""]
    if len(plans.phases) > 1 and plans.best is None:
        text.append("no plan of one phase runs all phases: plan each by itself (--seq-len)")
    elif plans.best is not None:
        text += plan_lines(plans.best)
    return text


def _phase(own: PhaseSearch) -> list[str]:
    phase, outcome = own.costs.phase, own.outcome
    length = "" if own.costs.module else f" × {phase.seq_len:,} tokens"
    threads = count_threads(own.costs.run, own.costs.device)
    each = f"; memory for ranks of {threads} thread{'s' * (threads > 1)}"
    counted = each if own.costs.device == "cpu" else ""
    return [
        f"phase {phase.name}: {phase.batch_rows:,} rows{length} a step; {outcome.grids:,} layouts "
        f"of {outcome.shapes:,} shapes, {outcome.solved:,} divided{counted}"
    ]


def _table(own: PhaseSearch) -> list[str]:
    """Return a line for each of the best plans: time, memory, and their parts."""
    found = []
    names = distinct_names([candidate.grid for candidate in own.outcome.candidates])
    for number, candidate in enumerate(own.outcome.candidates, start=1):
        times, memory = parts_of(candidate)
        price = candidate.solution.price
        found.append(
            f"{number:>3}  {price:.4g} s  {format_bytes(device_bytes(memory))}  "
            f"{names[number - 1]}{_gap(price, candidate.solution.bound)}"
        )
        found.append(f"     {_shares(times, price)}; {_sizes(memory)}")
    return found


def parts_of(candidate: Candidate) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds and bytes by part."""
    _, problem, made, timelines = build_phase_plan(candidate)
    return time_by_part(problem, made), peak_timeline(timelines).parts


def plan_lines(plan: LayoutPlan) -> list[str]:
    """Return a plan's file as text."""
    planned, predicted, layout = plan.planned, plan.predicted, plan.layout
    unit = "rows" if planned.module else "tokens"
    axes = {name: getattr(layout, name) for name in ("pp", "cp", "tp", "ep")}
    shown = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "dp alone"
    text = [
        f"plan         {planned.module or 'model'} {planned.model}, {planned.gpus} ranks, "
        f"{planned.hardware}{'' if planned.executable else ' (`trainer run` refuses it)'}",
        f"layout       {shown}, {plan.engine.describe()}, {plan.micro_batch_tokens:,} {unit} a "
        f"micro-batch{f', {layout.schedule}' if layout.pp > 1 else ''}"
        f"{f', cuts {list(layout.cuts)}' if layout.cuts else ''}",
    ]
    for span in plan.layers:
        first, last = span.layers
        where = f"{first}" if first == last else f"{first}–{last}"
        more = ", weights stay gathered" if span.reshard is False else ""
        more += f", shards of {span.shard}" if span.shard else ""
        more += ", tensor ranks as context ranks" if span.sequence else ""
        text.append(f"layers       {where}: recompute {_rule(span.recompute)}{more}")
    for phase in planned.phases:
        rate = phase.batch_tokens / phase.seconds / planned.gpus
        text.append(
            f"phase        {phase.name}: {phase.seconds:.4g} s a step, {rate:,.0f} {unit}/s on "
            "each device"
        )
    text.append(
        f"time         {predicted.seconds:.4g} s{_gap(predicted.seconds, predicted.bound)}: "
        f"{_shares(predicted.by, predicted.seconds)}"
    )
    text.append(f"memory       {format_bytes(predicted.memory)}: {_sizes(predicted.memory_by)}")
    if (measured := plan.measured) is not None:
        memory = f", {format_bytes(measured.memory)}" if measured.memory else ""
        text.append(f"measured     {measured.seconds:.4g} s{memory}, on {measured.date}")
    if predicted.estimated:
        text.append(
            f"estimated    {', '.join(predicted.estimated)}: no measured rate; priced by bytes and "
            "operations, which is optimistic"
        )
    return text


def compared(best: Candidate, other: Candidate) -> list[str]:
    """Return another plan's layout, and in which parts it takes more or less time than the best."""
    (mine, memory), (theirs, more) = parts_of(best), parts_of(other)
    price, seconds = best.solution.price, other.solution.price
    layouts = distinct_names([other.grid, best.grid])
    text = [
        f"{layouts[0]} against the best, {layouts[1]}",
        f"{seconds:.4g} s against {price:.4g} s of the best ({seconds / price - 1:+.1%}); "
        f"{format_bytes(device_bytes(more))} against {format_bytes(device_bytes(memory))}",
    ]
    for name, meaning in PARTS.items():
        change = theirs.get(name, 0.0) - mine.get(name, 0.0)
        if abs(change) > 0.002 * price:
            text.append(f"    {name:<10}{change:+.4g} s  {meaning}")
    return text


def explained_as_json(
    explained: Sequence[tuple[PhaseSearch, Candidate | PlanError]], wanted: Settings | None
) -> list[dict[str, Any]]:
    """Return, for each phase, the best plan with the `wanted` settings, or why there is none."""
    found = []
    for own, other in explained:
        each: dict[str, Any] = {"phase": own.costs.phase.name, "asked": dict(wanted or {})}
        if isinstance(other, Exception):
            found.append({**each, "error": str(other)})
            continue
        times, memory = parts_of(other)
        found.append(
            {
                **each,
                "layout": other.grid.settings(),
                "seconds": other.solution.price,
                "by": times,
                "best_seconds": own.best.solution.price,
                "best_by": parts_of(own.best)[0],
                "memory": device_bytes(memory),
                "memory_by": memory,
            }
        )
    return found


def _gap(price: float, bound: float) -> str:
    gap = 1 - bound / price
    return "" if gap < PROVED else f" (at most {gap:.1%} above the best division)"


def _shares(times: Mapping[str, float], price: float) -> str:
    return ", ".join(f"{name} {seconds / price:.1%}" for name, seconds in times.items())


def _sizes(memory: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items())


def _rule(rule: Rule) -> str:
    return rule if isinstance(rule, str) else f"all but {', '.join(rule.save)}"
