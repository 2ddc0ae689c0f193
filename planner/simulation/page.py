"""Page of a simulated plan: pipeline, collectives, memory, slow parts, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from operator import itemgetter

from ...console.html.chart import Chart, Curve, bounds
from ...console.html.gantt import Bar, draw_pipeline, draw_timeline
from ...console.html.page import (
    HALF,
    PALETTE,
    WIDE,
    colour,
    definitions,
    layer_stripe,
    legend,
    page,
    scrolling_table,
    section,
    tiles,
)
from ...console.progress import format_bytes, format_duration, format_number, format_seconds
from ..search.assemble import PARTS, time_by_part
from .events import HIDDEN
from .failures import HOUR
from .messages import RankMessage
from .outlook import FACTORS, PlanOutlook
from .slow import Slowdown

MAX_BARS = 6000
"""Passes that are drawn at most: the file must open at once."""
COLUMNS = 900
"""Columns in the memory chart; a column shows its lowest and its highest level."""
MAX_STAGES = 6
"""Stages in the memory chart."""
SLOW = 1.3
"""Factor for the slow rank among the figures at the top."""
LANES = ("compute", "recompute", "ends", "tensor", "context", "experts", "data", HIDDEN)
"""A micro-batch's lanes, from the top down."""
COLOURS = dict(zip((*LANES, "update", "bubble"), (*PALETTE[:8], "#8b9499", "#c9cdd0"), strict=True))


def simulation_page(title: str, cluster: str, outlooks: Sequence[PlanOutlook]) -> str:
    """Return the page for plans of several phases or layouts."""
    body = "".join(_plan(outlook, len(outlooks) > 1) for outlook in outlooks)
    head = (
        '<header><div><p class="over">headrace · simulated step</p>'
        f'<h1>{escape(title)}</h1></div><span class="count">{escape(cluster)}</span></header>'
    )
    return page(title, head + body)


def _plan(outlook: PlanOutlook, with_title: bool) -> str:
    simulation = outlook.simulation
    kinds = simulation.costs.kinds
    names = [kinds[kind].name for kind in simulation.problem.layers]
    heading = f'<h1 class="plan">{escape(outlook.title)}</h1>' if with_title else ""
    sections = (
        heading,
        layer_stripe(names, escape(simulation.grid.name())),
        _tiles(outlook),
        _pipeline(outlook),
        _micro_batch(outlook),
        _time_by_part(outlook),
        _memory(outlook),
        '<div class="pair">',
        _slow(outlook),
        _failures(outlook),
        "</div>",
        _messages(outlook),
        _figures(outlook),
    )
    return "".join(sections)


def _tiles(outlook: PlanOutlook) -> str:
    simulation = outlook.simulation
    rank = simulation.busiest * simulation.stage_ranks
    slowdown = outlook.slowdowns[0] if outlook.slowdowns else Slowdown("rank", rank, SLOW)
    excess = simulation.slow_down(slowdown).seconds / outlook.seconds - 1
    rate, unit = outlook.tokens / outlook.seconds, "rows" if simulation.costs.module else "tokens"
    slow_part = "rank" if slowdown.part == "rank" else f"{slowdown.part} link"
    return tiles(
        [
            ("step", format_seconds(outlook.seconds), f"{format_number(outlook.tokens)} {unit}"),
            (
                f"{unit} per second",
                format_number(rate),
                f"{format_number(rate / outlook.gpus)} on each device",
            ),
            (
                "memory",
                format_bytes(simulation.memory),
                f"at most, of {format_bytes(simulation.budget)}",
            ),
            (f"one slow {slow_part}", f"+{excess:.1%}", f"{slowdown.factor:g} times as long"),
            (
                "goodput",
                f"{outlook.goodput(outlook.best_interval):.2%}",
                f"a failure each {format_duration(outlook.mean_seconds)}",
            ),
            (
                "best checkpoint",
                format_duration(outlook.best_interval * outlook.seconds),
                f"each {outlook.best_interval:,} steps",
            ),
        ]
    )


def _pipeline(outlook: PlanOutlook) -> str:
    """Draw the passes of all stages, then with every slow part, on the same scale."""
    simulation = outlook.simulation
    problem = simulation.problem
    number = min(problem.micro_batches, max(1, MAX_BARS // (2 * problem.all_chunks)))
    steps = [("", simulation.shorten(number))]
    steps += [(str(slow), simulation.slow_down(slow, number)) for slow in outlook.slowdowns]
    until = max(step.seconds for _, step in steps)
    axis = _axis(until)
    drawings = []
    for name, step in steps:
        if name:
            longer = step.seconds / steps[0][1].seconds - 1
            drawings.append(f'<p class="note">with {escape(name)}: {longer:+.1%}</p>')
        drawings.append(
            draw_pipeline(step.timeline.spans, updates=step.updates, until=until, axis=axis)
        )
    keys = "".join(
        f'<span class="key"><i class="{kind}"></i>{kind}</span>'
        for kind in ("forward", "backward", "update")
    )
    shown = f"{number} of {problem.micro_batches}" if number < problem.micro_batches else number
    note = f"{shown} micro-batches"
    if problem.stages > 1:
        waits = max(simulation.step.timeline.bubbles)
        note += f", {problem.schedule.name}; a stage waits for at most {waits:.1%} of the step"
    return section("Pipeline", "".join(drawings), keys, note)


def _micro_batch(outlook: PlanOutlook) -> str:
    """Draw a micro-batch's events on a rank in the busiest stage."""
    simulation = outlook.simulation
    events = outlook.events.micro_batch_events(simulation.busiest)
    total = max(event.end for event in events)
    lanes = [
        (
            lane,
            [
                Bar(event.start, event.end, "event", event.text, fill=COLOURS[lane])
                for event in events
                if event.lane == lane
            ],
        )
        for lane in LANES
    ]
    drawn = draw_timeline([(lane, bars) for lane, bars in lanes if bars], total, _axis(total))
    note = (
        '<p class="note">Forward pass, then backward pass, layer by layer. Lanes wait for each '
        "other; <em>hidden</em> are messages of gathered weights and reduced gradients beside the "
        "computation, and <em>data</em> is what they add to the pass. Within a layer the order of "
        "the lanes is a convention.</p>"
    )
    where = f"stage {simulation.busiest}, " if simulation.problem.stages > 1 else ""
    return section("One micro-batch by events", drawn + note, unit=f"{where}a rank")


def _time_by_part(outlook: PlanOutlook) -> str:
    """Draw the parts of a step in the busiest stage as a bar, and list them."""
    seconds_by_part = time_by_part(outlook.simulation.problem, outlook.simulation.plan)
    bars, start = [], 0.0
    for name, seconds in seconds_by_part.items():
        bars.append(
            Bar(
                start,
                start + seconds,
                "event",
                f"{name} {format_seconds(seconds)}",
                fill=COLOURS[name],
            )
        )
        start += seconds
    rows = "".join(
        f"<tr><th>{_key(COLOURS[name])}{name}</th><td>{format_seconds(seconds)}</td>"
        f"<td>{seconds / start:.1%}</td><td>{PARTS[name]}</td></tr>"
        for name, seconds in seconds_by_part.items()
    )
    drawn = draw_timeline([("step", bars)], start) + scrolling_table(rows, style="meanings")
    return section("Time by part", drawn, unit="busiest stage")


def _memory(outlook: PlanOutlook) -> str:
    simulation = outlook.simulation
    stages = sorted({*_spread(simulation.problem.stages, MAX_STAGES - 1), simulation.fullest})
    curves = [envelope(outlook.events.memory(stage), simulation.step.seconds) for stage in stages]
    highest = max(max(curve.y) for curve in curves)
    limit = simulation.budget
    chart = Chart(
        WIDE,
        250,
        (0.0, simulation.step.seconds),
        bounds([highest, limit], zero=True),
        format_bytes,
        x_label=_axis(simulation.step.seconds),
        x_unit="",
    )
    chart.axes()
    chart.line(Curve([0.0, simulation.step.seconds], [limit, limit]), "limit")
    if len(curves) == 1:
        chart.area(curves[0], "fill")
    for number, curve in enumerate(curves):
        chart.line(curve, "thin", colour(number))
    names = [f"stage {stage}" for stage in stages]
    note = (
        '<p class="note">The traced bytes of a rank: state, gathered weights, activations, working '
        f"set, gradients, buffers. At most {format_bytes(simulation.memory)}. Dashed: the limit of "
        "the search.</p>"
    )
    keys = legend(names) if len(names) > 1 else ""
    return section("Memory by events", chart.render("memory over a step") + note, keys, "of a rank")


def _slow(outlook: PlanOutlook) -> str:
    """Draw a step's seconds over the factor of a slow part."""
    curves = {name: times for name, times in outlook.curves.items() if times[-1] > times[0]}
    high = max(times[-1] for times in outlook.curves.values())
    span = (outlook.seconds, max(high, outlook.seconds * 1.05))
    chart = Chart(
        HALF,
        230,
        (FACTORS[0], FACTORS[-1]),
        span,
        format_seconds,
        x_label=lambda f: f"×{f:g}",
        x_unit="",
    )
    chart.axes()
    for number, times in enumerate(curves.values()):
        chart.line(Curve(list(FACTORS), times), "strong", colour(number))
    rows = "".join(
        f"<tr><th>{escape(str(slow))}</th><td>{format_seconds(step.seconds)}</td>"
        f"<td>{step.seconds / outlook.seconds - 1:+.1%}</td></tr>"
        for slow, step in outlook.slowed_steps
    )
    table = scrolling_table(rows) if rows else ""
    note = (
        '<p class="note">Seconds of a step if one part of the busiest stage takes as many times as '
        "long. All ranks wait for it.</p>"
    )
    drawn = chart.render("step over the factor of a slow part")
    return section("One slow rank or link", legend(list(curves)) + drawn + table + note)


def _failures(outlook: PlanOutlook) -> str:
    """Draw goodput over the checkpoint interval."""
    failures, step = outlook.failures, outlook.seconds
    intervals = outlook.intervals()
    last = max(4 * outlook.best_interval, *(2 * every for every in intervals.values()))
    points = sorted({max(1, round(last * n / 160)) for n in range(1, 161)})
    curve = Curve(
        [every * step / 60 for every in points], [outlook.goodput(every) for every in points]
    )
    best = outlook.goodput(outlook.best_interval)
    low = min(outlook.goodput(every) for every in (last, *intervals.values()))
    low = min(best - 0.2 * (best - low) - 0.01, low)
    chart = Chart(
        HALF,
        230,
        (0.0, curve.x[-1]),
        (low, best + (best - low) * 0.12),
        lambda value: f"{value:.1%}",
        x_unit="minutes",
    )
    chart.axes()
    chart.area(curve, "fill")
    chart.line(curve, "strong")
    chart.marks([outlook.best_interval * step / 60], "skipped", "best interval")
    rows = "".join(
        f"<tr><th>{'best, by simulation' if name == 'best' else name}</th>"
        f"<td>{every:,} steps</td><td>{format_duration(every * step)}</td>"
        f"<td>{outlook.goodput(every):.2%}</td></tr>"
        for name, every in intervals.items()
    )
    note = (
        f'<p class="note">Failures of {outlook.gpus:,} devices, each with one in '
        f"{failures.mtbf:,.0f} hours: one in {outlook.mean_seconds / HOUR:.3g} hours. A restart "
        f"takes {failures.restart:g} s; a checkpoint blocks {failures.save:g} s and is written for "
        f"{failures.write:g} s beside the steps.</p>"
    )
    drawn = chart.render("goodput over the interval between checkpoints")
    return section("Goodput with failures", f"{drawn}{scrolling_table(rows)}{note}")


def _messages(outlook: PlanOutlook) -> str:
    """Return a table of distinct messages, with the kinds of layers that send them."""
    kinds = outlook.simulation.costs.kinds
    senders: dict[tuple[str, ...], tuple[float, list[str]]] = {}
    for kind, messages in zip(kinds, outlook.events.messages.layers, strict=True):
        for message in messages:
            size = format_bytes(float(f"{message.size:.2g}"))
            key = message.axis, message.collective, _group(message), size
            seconds, names = senders.setdefault(key, (message.seconds, []))
            senders[key] = max(seconds, message.seconds), [*names, kind.name]
    if not senders:
        return ""
    axes = list(PARTS)
    rows = "".join(
        f"<tr><th>{_key(COLOURS[axis])}{axis}</th><td>{collective}</td><td>{group}</td>"
        f"<td>{size}</td><td>{format_seconds(seconds)}</td>"
        f"<td>{escape(', '.join(dict.fromkeys(names)))}</td></tr>"
        for (axis, collective, group, size), (seconds, names) in sorted(
            senders.items(), key=lambda entry: (axes.index(entry[0][0]), -entry[1][0])
        )
    )
    heads = ("axis", "collective", "ranks", "size", "time alone", "layers")
    table = scrolling_table(rows, heads, "meanings")
    return section("Collectives", table, unit="messages of a layer, for one micro-batch")


def _group(message: RankMessage) -> str:
    nodes = message.ranks // message.near
    if message.collective == "p2p":
        return "next rank" if message.near > 1 else "next node"
    return f"{message.ranks:,}" + (f" on {nodes:,} nodes" if nodes > 1 else " in a node")


def _figures(outlook: PlanOutlook) -> str:
    costs = outlook.simulation.costs
    hardware = costs.machine.hardware
    estimated = ", ".join(sorted(costs.machine.estimated))
    values = {
        "layout": outlook.simulation.grid.name(),
        "cuts": ", ".join(map(str, outlook.simulation.plan.cuts)) or "none",
        "hardware": f"{hardware.file.name}#{hardware.digest}",
        "estimated": f"{estimated}: no measured rate; priced by bytes and operations"
        if estimated
        else "nothing: all rates are rows of the hardware file",
    }
    return f"<section><h2>Figures behind it</h2>{definitions(values)}</section>"


def envelope(points: Iterable[tuple[float, float]], total: float) -> Curve:
    """Return the first, last, lowest and highest points in every column, in their order."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        columns.setdefault(int(x / total * COLUMNS), []).append((x, y))
    outline: list[tuple[float, float]] = []
    height = itemgetter(1)
    for column in columns.values():
        extremes = {column[0], column[-1], min(column, key=height), max(column, key=height)}
        outline += [point for point in dict.fromkeys(column) if point in extremes]
    return Curve([x for x, _ in outline], [y for _, y in outline])


def _spread(count: int, max_numbers: int) -> list[int]:
    """Return evenly spread numbers below `count`, from the first to the last."""
    if count <= max_numbers:
        return list(range(count))
    return [round(n * (count - 1) / (max_numbers - 1)) for n in range(max_numbers)]


def _key(paint: str) -> str:
    return f'<span class="key"><i style="background:{paint}"></i></span>'


def _axis(total: float) -> Callable[[float], str]:
    """Return a time axis's labels in a unit that suits the total."""
    if total >= 600:
        return lambda seconds: f"{seconds / 60:g} min"
    if total >= 1:
        return lambda seconds: f"{seconds:g} s"
    return lambda seconds: f"{seconds * 1e3:g} ms"
