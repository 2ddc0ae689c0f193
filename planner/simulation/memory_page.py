"""Page of a plan's memory: each stage over a step, by part, and each layer."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ...console.html.chart import Chart, Curve, bounds
from ...console.html.page import WIDE, colour, layer_stripe, legend, page, section, tiles
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

MOST_STAGES = 6
"""Stages that are drawn: the first ones, and the last."""


def plan_timelines(
    plan: LayoutPlan,
    phase: PlannedPhase,
    model: ModelConfig,
    run: RunConfig,
    device: str,
    modules: TracedModules | None = None,
) -> list[Timeline]:
    """Return the memory of a rank of each stage over a step of a phase of a plan. `modules` are
    those that are not ours, which `model` stands for."""
    if (own := model_hash(model)) != plan.planned.model:
        raise PlanError(
            f"the plan is for model {plan.planned.model}, and this one is {own}",
            hint=f"{modules.model.module} has changed since: plan it again"
            if modules
            else "name the model that it was planned for",
        )
    precision = PRECISIONS[run.precision]
    rows = uniform_phase(phase.seq_len, phase.batch_tokens // phase.seq_len)
    grid = make_grid(plan.layout, plan.engine, plan.micro_batch_tokens, plan.planned.gpus, rows)
    if modules is not None:
        from ..modules.memory import ModuleParts

        made = ModuleParts(modules.model, modules.trace, precision)
        memory = RankMemory(made, run, precision, device, modules.trace.layers)
    else:
        parts = ConfigParts(model, run, phase.seq_len, precision, device)
        memory = RankMemory(parts, run, precision, device, parts.layers)
    sequence = [
        span.sequence for span in plan.layers for _ in range(span.layers[0], span.layers[1] + 1)
    ]
    cuts = plan.layout.cuts or ()
    return memory.timelines(grid, plan.engine_of_layers, cuts, plan.rules, sequence)


def memory_page(title: str, batch: str, names: Sequence[str], timelines: Sequence[Timeline]) -> str:
    """Return the page. `batch` is the batch in words, and `names` are those of the layers."""
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
            ("moment", escape(_name(peak)), f"micro-batch {peak.micro}"),
            (
                "state",
                format_bytes(device_bytes(timelines[fullest].moments[0].end)),
                "before the step",
            ),
        ]
    )
    shown = sorted({*range(min(len(sizes), MOST_STAGES - 1)), len(sizes) - 1, fullest})
    stages = "".join(_stage(stage, timelines[stage], len(sizes)) for stage in shown)
    layers = "".join(_layers(stage, timelines[stage], len(sizes)) for stage in shown)
    stripe = layer_stripe(names, f"{len(names)} layers")
    return page(title, head + stripe + figures + stages + layers)


def _name(moment: Moment) -> str:
    layer = "" if moment.layer is None else f" (layer {moment.layer})"
    return f"{moment.name}{layer}"


def _stage(stage: int, timeline: Timeline, stages: int) -> str:
    """Draw the parts of a stage's memory on each other, moment by moment."""
    moments = timeline.moments
    most = {
        name: max(moment.high.get(name, 0) for moment in moments)
        for moment in moments
        for name in moment.high
        if not name.startswith(HOST)
    }
    names = [name for name, size in most.items() if size]
    sums = [list(accumulate(m.high.get(name, 0) for name in names)) for m in moments]
    chart = Chart(
        WIDE,
        260,
        (0.0, float(len(moments))),
        bounds([timeline.highest], zero=True),
        format_bytes,
        x_label=lambda place: f"{place:g}",
        x_unit="moment",
    )
    chart.axes()
    edges = [float(x) for n in range(len(moments)) for x in (n, n + 1)]
    for number in reversed(range(len(names))):
        heights = [float(each[number]) for each in sums for _ in range(2)]
        chart.area(Curve(edges, heights), "part", colour(number))
    chart.tooltips(
        (n, n + 1, f"{_name(moment)}: {format_bytes(device_bytes(moment.high))}\n{_sizes(moment)}")
        for n, moment in enumerate(moments)
    )
    where = f"stage {stage}" if stages > 1 else "a rank"
    drawn = chart.render(f"memory over a step by part, {where}")
    return section("Memory over a step", drawn, legend(names), f"{where}, by part")


def _sizes(moment: Moment) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in moment.high.items() if size)


def _layers(stage: int, timeline: Timeline, stages: int) -> str:
    """Return a table of the layers: the highest level of both passes, and its parts."""
    found: dict[str, dict[str, Moment]] = {}
    for moment in timeline.moments:
        kind, _, name = moment.name.partition(" ")
        key = name if moment.layer is None else f"{moment.layer} {name}"
        known = found.setdefault(key, {}).setdefault(kind, moment)
        if device_bytes(moment.high) > device_bytes(known.high):
            found[key][kind] = moment
    rows = "".join(
        f"<tr><th>{escape(key)}</th>"
        + "".join(
            f"<td>{format_bytes(device_bytes(each[kind].high))}</td>"
            for kind in ("forward", "backward")
        )
        + f"<td>{escape(_sizes(each['backward']))}</td></tr>"
        for key, each in found.items()
        if "forward" in each and "backward" in each
    )
    heads = ("layer", "forward pass", "backward pass", "parts in the backward pass")
    head = "".join(f"<th>{name}</th>" for name in heads)
    table = (
        f'<div class="scroll"><table class="meanings"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    where = f"stage {stage}" if stages > 1 else "a rank"
    return section("Highest level by layer", table, unit=where)
