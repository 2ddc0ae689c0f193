"""Plans for several numbers of devices: how a run scales, and what a budget of tokens takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from ..console.errors import PlanError
from ..console.progress import format_bytes, format_number, format_seconds
from ..console.yaml_text import value
from .lengths import MeanStep, average_plans
from .search.assemble import build_phase_plan
from .search.make import PhaseSearch, PlanRequest, Plans, make_plans
from .search.utilisation import compute_mfu

DAY = 86_400


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of devices such as `64,128,256`."""
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not word.isdecimal() or int(word) < 1]:
        raise click.UsageError(f"--gpus {text}: `{wrong[0]}` is not a number of devices")
    return tuple(dict.fromkeys(map(int, words)))


def parse_tokens(options: dict[str, Any]) -> int | None:
    """Return the tokens of the run; None without --tokens."""
    if options["tokens"] is None:
        return None
    if options["mixture"] is not None or options["module"] is not None:
        raise click.UsageError("--tokens goes with --seq-len: a mixture has its own tokens")
    tokens = value(options["tokens"])
    if not isinstance(tokens, int | float) or tokens < 1:
        raise click.UsageError(f"--tokens {options['tokens']} is no number of tokens, such as 2T")
    return round(tokens)


@dataclass(frozen=True)
class Scale:
    """The best plan of a phase on a number of devices."""

    gpus: int
    phase: str
    layout: str
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory: int
    days: float | None
    """Of the phase's tokens, or of the budget; None without either."""

    @property
    def gpu_hours(self) -> float | None:
        return None if self.days is None else 24 * self.days * self.gpus


def plan_scales(request: PlanRequest, counts: Sequence[int], tokens: int | None) -> list[Scale]:
    """Return the best plan of each phase on each number of devices that has one.

    `tokens` is the budget of a single phase; phases of a mixture have their own.
    """
    scales, errors = [], []
    for gpus in counts:
        try:
            plans = make_plans(replace(request, gpus=gpus))
        except PlanError as error:
            errors.append(error)
            continue
        means = average_plans(plans)
        split = {phase.name for phase in request.phases if phase.whole is not phase}
        scales += [
            summarize(plans, phase, tokens)
            for phase in plans.phases
            if not means or phase.costs.phase.name not in split
        ]
        scales += [_summarize_lengths(plans, mean) for mean in means]
    if not scales:
        raise errors[-1]
    return scales


def summarize(plans: Plans, phase_search: PhaseSearch, tokens: int | None) -> Scale:
    phase, best = phase_search.costs.phase, phase_search.best
    seconds = best.solution.price
    rate = phase.seq_len * phase.batch_rows / seconds
    total = tokens if tokens is not None else phase.seq_len * phase.rows
    has_total = tokens is not None or phase.rows > phase.batch_rows
    memory = max(timeline.highest for timeline in build_phase_plan(best).timelines)
    return Scale(
        gpus=plans.request.gpus,
        phase=phase.name,
        layout=best.grid.name(),
        seconds=seconds,
        tokens_per_second=rate,
        mfu=compute_mfu(plans.request, phase.seq_len, rate),
        memory=memory,
        days=total / rate / DAY if has_total else None,
    )


def _summarize_lengths(plans: Plans, mean: MeanStep) -> Scale:
    """Return the plan that serves all phases, in a phase whose steps have several lengths."""
    request, best = plans.request, plans.best
    assert best is not None
    phase = next(p.whole for p in request.phases if p.whole.name == mean.phase)
    rate = phase.seq_len * phase.batch_rows / mean.mean
    shares = [(share, compute_mfu(request, length, rate)) for length, share in mean.shares.items()]
    grids = [plan.grid for plan in plans.best_in_phases] or [plans.phases[0].best.grid]
    return Scale(
        gpus=request.gpus,
        phase=mean.phase,
        layout=grids[0].name(),
        seconds=mean.mean,
        tokens_per_second=rate,
        mfu=sum(share * mfu for share, mfu in shares if mfu is not None) or None,
        memory=best.predicted.memory,
        days=phase.tokens / rate / DAY,
    )


def describe_scales(scales: Sequence[Scale]) -> Iterator[str]:
    """Yield a table for each phase. Scaling is the speed of a device beside that of the first."""
    for phase in dict.fromkeys(scale.phase for scale in scales):
        rows = [scale for scale in scales if scale.phase == phase]
        first = rows[0].tokens_per_second / rows[0].gpus
        yield (
            f"phase {phase}\n{'devices':>9}{'step':>12}{'tokens/s':>10}{'MFU':>7}{'scaling':>9}"
            f"{'memory':>10}{'days':>8}{'GPU-hours':>11}  layout"
        )
        for row in rows:
            scaling = row.tokens_per_second / row.gpus / first
            days = "–" if row.days is None else f"{row.days:.3g}"
            hours = "–" if row.gpu_hours is None else format_number(row.gpu_hours)
            yield (
                f"{row.gpus:>9,}{format_seconds(row.seconds):>12}"
                f"{format_number(row.tokens_per_second):>10}"
                f"{'–' if row.mfu is None else f'{row.mfu:.1%}':>7}{scaling:>9.1%}"
                f"{format_bytes(row.memory):>10}{days:>8}{hours:>11}  {row.layout}"
            )


def dump_scale(scale: Scale) -> dict[str, object]:
    """Return a row for JSON."""
    return {**asdict(scale), "gpu_hours": scale.gpu_hours}
