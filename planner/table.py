"""Tables of a search: a line for each idea, and for each kind of parallelism that the best plan
does without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..console.progress import format_bytes, format_number, format_seconds
from ..models.accounting.state import device_bytes
from .lengths import average_plans
from .memory.model_parts import count_threads
from .search.assemble import find_band, peak_timeline
from .search.ideas import KINDS, name_idea
from .search.make import IDEAS, PhaseSearch, PlanRequest, Plans
from .search.outcome import Candidate
from .search.utilisation import compute_mfu
from .show import describe_plan, split_totals

if TYPE_CHECKING:
    from ..dataplane.order.timeline import PhaseRows

EQUAL = 1e-4
"""Relative difference of two steps below which variants of an idea are one program."""
NEAR = 0.01
"""Relative difference of two steps below which an idea's variants are named beside it."""
VARIANTS = 2
"""Variants that are named at most."""


def describe_plans(plans: Plans) -> list[str]:
    """Return the ideas of every phase, then the plan that serves all phases."""
    lines = []
    for phase_search in plans.phases:
        lines += [
            *_describe_phase(plans.request, phase_search),
            *_describe_ideas(plans.request, phase_search),
            *_describe_omissions(phase_search),
            "",
        ]
    if len(plans.phases) > 1 and plans.best is None:
        lines.append("no plan of one phase runs all phases: plan each by itself (--seq-len)")
    elif plans.best is not None:
        lines += describe_plan(plans.best)
    return [*lines, *(f"steps        {mean.describe()}" for mean in average_plans(plans))]


def _describe_phase(request: PlanRequest, phase_search: PhaseSearch) -> Iterator[str]:
    costs, outcome = phase_search.costs, phase_search.outcome
    phase = costs.phase
    length = "" if costs.module else f" × {phase.seq_len:,} tokens"
    yield (
        f"phase {phase.name}: {phase.batch_rows:,} rows{length} a step; {outcome.shapes:,} shapes, "
        f"{outcome.grids:,} layouts of promising ones, {outcome.solved:,} searched in full"
    )
    file = request.hardware.file
    reserved = file.reserved.bytes / file.device.memory
    line = (
        f"memory: {format_bytes(request.budget)} of each device's "
        f"{format_bytes(file.device.memory)}: {reserved:.0%} are reserved, and "
        f"{1 - request.memory:.0%} of the rest stay free (--memory)"
    )
    if costs.device == "cpu":
        threads = count_threads(costs.run, costs.device)
        line += f"; ranks have {threads} thread{'s' * (threads > 1)}"
    yield line


def _describe_ideas(request: PlanRequest, phase_search: PhaseSearch) -> Iterator[str]:
    costs, outcome = phase_search.costs, phase_search.outcome
    unit = "rows/s" if costs.module else "tokens/s"
    band = find_band(costs, phase_search.best.grid)
    if band is not None:
        yield f"steps are ± {band:.0%}: differences below that decide nothing alone"
    yield f"{'step':>15}{'':9}{unit:<10}{'MFU':<7}{'memory':<9}layout"
    best_price = phase_search.best.solution.price
    tokens = _tokens(costs.phase)
    for number, candidate in enumerate(outcome.ideas[:IDEAS], start=1):
        price = candidate.solution.price
        mfu = compute_mfu(request, costs.phase.seq_len, tokens / price)
        more = "" if number == 1 else f"{price / best_price - 1:+.1%}"
        yield (
            f"{number:>3}{format_seconds(price):>12}{more:>7}  {format_number(tokens / price):<10}"
            f"{'–' if mfu is None else f'{mfu:.1%}':<7}{_format_peak(candidate):<9}"
            f"{candidate.grid.name()}"
        )
        if variants := _describe_variants(candidate, outcome.candidates):
            yield f"{'':50}or {variants}"


def dump_ideas(request: PlanRequest, phase_search: PhaseSearch) -> list[dict[str, Any]]:
    """Return the best plan of each idea, for JSON."""
    phase = phase_search.costs.phase
    return [
        {
            "idea": name_idea(candidate.grid)._asdict(),
            "layout": candidate.grid.name(),
            "seconds": candidate.solution.price,
            "tokens_per_second": (rate := _tokens(phase) / candidate.solution.price),
            "mfu": compute_mfu(request, phase.seq_len, rate),
            "memory": device_bytes(peak_timeline(candidate.timelines).parts),
        }
        for candidate in phase_search.outcome.ideas
    ]


def _tokens(phase: PhaseRows) -> int:
    return phase.seq_len * phase.batch_rows


def _format_peak(candidate: Candidate) -> str:
    return format_bytes(device_bytes(peak_timeline(candidate.timelines).parts))


def _describe_variants(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """Name the nearest variants of an idea. Equal programs are one."""
    idea, price = name_idea(candidate.grid), candidate.solution.price
    texts: list[tuple[float, str]] = []
    for variant in candidates:
        change = variant.solution.price / price - 1
        if variant is candidate or name_idea(variant.grid) != idea or change > NEAR:
            continue
        if any(abs(change - shown) < EQUAL for shown, _ in texts):
            continue
        if change > EQUAL:
            texts.append((change, f"{variant.grid.describe_variant()} ({change:+.1%})"))
    return "; ".join(text for _, text in texts[:VARIANTS])


def _describe_omissions(phase_search: PhaseSearch) -> Iterator[str]:
    """Say what each kind of parallelism that the best plan does without would cost."""
    best, outcome = phase_search.best, phase_search.outcome
    best_kinds, best_price = set(name_idea(best.grid).kinds), best.solution.price
    for kind in KINDS.values():
        if kind in best_kinds or kind not in outcome.kinds:
            continue
        candidate = outcome.best_with(kind)
        if candidate is None:
            yield f"why not {kind}: no such layout fits and takes less than twice the best step"
            continue
        more = candidate.solution.price / best_price - 1
        reasons = ", ".join(_compare_parts(best, candidate)) or "within the error of any price"
        yield f"why not {kind}: {more:+.1%} with {candidate.grid.name()}: {reasons}"


def _compare_parts(best: Candidate, candidate: Candidate) -> Iterator[str]:
    """Name the two parts of a step that grow most."""
    best_times, times = (split_totals(plan)[0] for plan in (best, candidate))
    changes = {part: seconds - best_times.get(part, 0.0) for part, seconds in times.items()}
    for part, change in sorted(changes.items(), key=lambda item: -item[1])[:2]:
        if change > 0.002 * best.solution.price:
            yield f"{part} +{format_seconds(change)}"
