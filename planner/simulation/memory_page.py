"""Page of a plan's memory: stages over a step by part, and layers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ...console.html.chart import Chart, Curve, bounds
from ...console.html.page import (
    WIDE,
    colour,
    layer_stripe,
    legend,
    page,
    scrolling_table,
    section,
    tiles,
)
from ...console.progress import format_bytes
from ...models.accounting.level import Moment
from ...models.accounting.state import HOST, device_bytes
from ...models.accounting.step import Timeline
from ...models.config.options.precision import PRECISIONS
from ...trainer.run.layout_plan import LayoutPlan, PlannedPhase, model_hash
from ..grid.grid import make_grid
from ..memory.model_parts import ConfigParts
from ..memory.rank_memory import RankMemory
from ..search.make import uniform_phase

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ...trainer.run.config import RunConfig
    from ..modules.model import TracedModules

MAX_STAGES = 6
"""Stages that are drawn: the first, and the last."""


def plan_timelines(
    plan: LayoutPlan,
    phase: PlannedPhase,
    model: ModelConfig,
    run: RunConfig,
    device: str,
    modules: TracedModules | None = None,
) -> list[Timeline]:
    """Return a rank's memory over a step in this phase of a plan, by stage.

    `modules` are foreign modules that `model` stands for.
    """
    if (digest := modules.hash if modules else model_hash(model)) != plan.planned.model:
        raise PlanError(
            f"the plan is for model {plan.planned.model}, and this one is {digest}",
            hint=f"{modules.model.module} has changed since: plan it again"
            if modules
            else "name the model that it was planned for",
        )
    precision = PRECISIONS[run.precision]
    rows = uniform_phase(phase.seq_len, phase.batch_tokens // phase.seq_len)
    grid = make_grid(plan.layout, plan.engine, plan.micro_batch_tokens, plan.planned.gpus, rows)
    if modules is not None:
        from ..modules.memory import ModuleParts

        module_parts = ModuleParts(modules.model, modules.trace, precision)
        memory = RankMemory(module_parts, run, precision, device, modules.trace.layers)
    else:
        model_parts = ConfigParts(model, run, phase.seq_len, precision, device)
        memory = RankMemory(model_parts, run, precision, device, model_parts.layers)
    sequence = [
        span.sequence for span in plan.layers for _ in range(span.layers[0], span.layers[1] + 1)
    ]
    cuts = plan.layout.cuts or ()
    return memory.timelines(grid, plan.resolved_engine, cuts, plan.rules, sequence)


def memory_page(title: str, batch: str, names: Sequence[str], timelines: Sequence[Timeline]) -> str:
    """Return the page. `batch` describes the batch, and `names` are the layers' names."""
    sizes = [timeline.highest for timeline in timelines]
    fullest = sizes.index(max(sizes))
    peak = timelines[fullest].peak
    head = (
        '<header><div><p class="over">headrace · memory of a plan</p>'
        f'<h1>{escape(title)}</h1></div><span class="count">{batch}</span></header>'
    )
    figures = tiles(
        [
            ("memory", format_bytes(max(sizes)), f"stage {fullest}, at the highest moment"),
            ("moment", escape(_format_moment(peak)), f"micro-batch {peak.micro}"),
            (
                "state",
                format_bytes(device_bytes(timelines[fullest].moments[0].end)),
                "before the step",
            ),
        ]
    )
    drawn = sorted({*range(min(len(sizes), MAX_STAGES - 1)), len(sizes) - 1, fullest})
    stages = "".join(_stage(stage, timelines[stage], len(sizes)) for stage in drawn)
    layers = "".join(_layers(stage, timelines[stage], len(sizes)) for stage in drawn)
    stripe = layer_stripe(names, f"{len(names)} layers")
    return page(title, head + stripe + figures + stages + layers)


def _format_moment(moment: Moment) -> str:
    layer = "" if moment.layer is None else f" (layer {moment.layer})"
    return f"{moment.name}{layer}"


def _stage(stage: int, timeline: Timeline, stages: int) -> str:
    """Draw a stage's memory moment by moment, its parts stacked."""
    moments = timeline.moments
    highest = {
        name: max(moment.high.get(name, 0) for moment in moments)
        for moment in moments
        for name in moment.high
        if not name.startswith(HOST)
    }
    names = [name for name, size in highest.items() if size]
    sums = [list(accumulate(m.high.get(name, 0) for name in names)) for m in moments]
    chart = Chart(
        WIDE,
        260,
        (0.0, float(len(moments))),
        bounds([timeline.highest], zero=True),
        format_bytes,
        x_label=lambda number: f"{number:g}",
        x_unit="moment",
    )
    chart.axes()
    edges = [float(x) for n in range(len(moments)) for x in (n, n + 1)]
    for number in reversed(range(len(names))):
        heights = [float(levels[number]) for levels in sums for _ in range(2)]
        chart.area(Curve(edges, heights), "part", colour(number))
    chart.tooltips(
        (
            n,
            n + 1,
            f"{_format_moment(moment)}: {_level(moment)}\n{_sizes(moment)}",
        )
        for n, moment in enumerate(moments)
    )
    where = f"stage {stage}" if stages > 1 else "a rank"
    svg = chart.render(f"memory over a step by part, {where}")
    return section("Memory over a step", svg, legend(names), f"{where}, by part")


def _level(moment: Moment) -> str:
    return format_bytes(device_bytes(moment.high))


def _sizes(moment: Moment) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in moment.high.items() if size)


def _layers(stage: int, timeline: Timeline, stages: int) -> str:
    """Return a table of layers: the highest level in both passes, and its parts."""
    peaks: dict[str, dict[str, Moment]] = {}
    for moment in timeline.moments:
        kind, _, name = moment.name.partition(" ")
        key = name if moment.layer is None else f"{moment.layer} {name}"
        peak = peaks.setdefault(key, {}).setdefault(kind, moment)
        if device_bytes(moment.high) > device_bytes(peak.high):
            peaks[key][kind] = moment
    rows = "".join(
        f"<tr><th>{escape(key)}</th>"
        + "".join(f"<td>{_level(passes[kind])}</td>" for kind in ("forward", "backward"))
        + f"<td>{escape(_sizes(passes['backward']))}</td></tr>"
        for key, passes in peaks.items()
        if "forward" in passes and "backward" in passes
    )
    heads = ("layer", "forward pass", "backward pass", "parts in the backward pass")
    table = scrolling_table(rows, heads, "meanings")
    where = f"stage {stage}" if stages > 1 else "a rank"
    return section("Highest level by layer", table, unit=where)
