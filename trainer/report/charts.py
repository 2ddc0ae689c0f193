"""The charts of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...console.progress import human
from ..drawing.chart import BOTTOM, LINE, TOP, Chart, Curve, bounds, most, ticks
from ..drawing.page import HALF, WIDE, colour
from .data import RunData, extremes, planned_over_tokens, realised_over_tokens, smooth, thin
from .outliers import OutlierStep
from .tooltips import tooltips


def extent(runs: Sequence[RunData]) -> tuple[float, float]:
    return (
        float(min(run.first_token for run in runs)),
        float(max(run.last_token for run in runs)),
    )


def spans(run: RunData) -> list[tuple[str, float, float]]:
    return [
        (phase.name, float(phase.first_token), float(phase.last_token))
        for phase in run.job.plan.phases
    ]


def steps(run: RunData) -> list[tuple[float, int]]:
    """Return round step numbers, and the tokens at which they begin."""
    plan = run.job.plan
    last = min(plan.first_step + len(run.metrics), plan.last_step - 1)
    wanted = dict.fromkeys(int(value) for value in ticks(plan.first_step, last, count=7))
    return [(float(plan.step(step).first_token), step) for step in wanted]


def loss(run: RunData, outliers: Sequence[OutlierStep]) -> str:
    """Draw every step's loss faint and the smoothed loss strong, with a line for each source if
    there are several."""
    whole = run.curve("loss")
    mean = _smooth(whole)
    many = len(run.sources) > 1
    by_source = [_smooth(run.source_loss(name)) for name in run.sources] if many else []
    chart = Chart(
        WIDE, 350, extent([run]), _visible_range([mean, *by_source], whole), _plain, BOTTOM + LINE
    )
    chart.bands(spans(run))
    chart.axes(steps(run))
    for number, curve in enumerate(by_source):
        chart.line(curve, "thin", colour(number))
    chart.line(extremes(whole), "faint")
    chart.line(mean, "strong")
    chart.beyond(whole)
    _events(chart, run)
    chart.rings((outlier.entry["tokens"], outlier.entry["loss"]) for outlier in outliers)
    chart.tooltips(tooltips(run))
    return chart.text("loss over tokens")


def _smooth(curve: Curve) -> Curve:
    points = thin(curve)
    return smooth(points, max(3, len(points.x) // 40))


def _visible_range(means: Sequence[Curve], whole: Curve) -> tuple[float, float]:
    """Return the range of the smoothed losses without the first steps' fall, and space for
    outliers."""
    known = [curve.y for curve in means if curve.y]
    if not known:
        return (0.0, 1.0)
    low, high = min(min(y) for y in known), max(most(y, 0.95) for y in known)
    space = 0.4 * (high - low)
    return bounds([low, high, min(max(whole.y), high + space), max(min(whole.y), low - space)])


def _events(chart: Chart, run: RunData) -> None:
    chart.marks(run.restarts, "restart", "resumed")
    chart.marks(run.tokens_at([event["step"] for event in run.skipped]), "skipped", "skipped")


def held_out(runs: Sequence[RunData]) -> str:
    """Draw the loss on held-out rows: of one run by source, of several over all sources."""
    if len(runs) == 1:
        curves = list(runs[0].held_out_curves().values())
        painted = [("strong", None), *(("medium", colour(n)) for n in range(len(curves) - 1))]
    else:
        curves = [run.held_out_curves()["all"] for run in runs if run.evaluations]
        painted = [("strong", colour(n)) for n, run in enumerate(runs) if run.evaluations]
    y_range = bounds(y for curve in curves if curve.y for y in (min(curve.y), most(curve.y)))
    chart = Chart(WIDE, 230, extent(runs), y_range, _plain)
    _phases(chart, runs)
    chart.axes()
    for curve, (kind, paint) in zip(curves, painted, strict=True):
        chart.line(curve, kind, *([paint] if paint else []))
    return chart.text("loss on held-out rows over tokens")


def learning_rate(run: RunData) -> str:
    curve = thin(run.curve("lr"))
    chart = Chart(WIDE, 150, extent([run]), bounds(curve.y, zero=True), _short)
    chart.bands(spans(run))
    chart.axes()
    chart.area(curve, "fill")
    chart.line(curve, "strong")
    chart.marks(run.restarts, "restart", "resumed")
    return chart.text("learning rate over tokens")


def mixture(run: RunData) -> str:
    """Draw the planned shares above the realised shares, over the same tokens."""
    colours = [colour(number) for number in range(len(run.sources))]
    chart = Chart(WIDE, 146, extent([run]))
    chart.bands(spans(run))
    chart.strip("plan", TOP, 46, planned_over_tokens(run), colours, run.sources)
    realised = realised_over_tokens(run, bins=160)
    chart.strip("realised", TOP + 52, 46, realised, colours, run.sources)
    chart.x_axis()
    return chart.text("planned and realised shares over tokens")


def source_speeds(run: RunData) -> str:
    """Draw the tokens of each source per second, smoothed."""
    curves = [_smooth(run.source_speed(name)) for name in run.sources]
    y_range = bounds((most(curve.y) * 1.1 for curve in curves if curve.y), zero=True)
    chart = Chart(HALF, 170, extent([run]), y_range, human)
    chart.bands(spans(run))
    chart.axes()
    for number, curve in enumerate(curves):
        chart.line(curve, "medium", colour(number))
    return chart.text("tokens of each source per second")


def small(
    run: RunData,
    key: str,
    title: str,
    *,
    percent: bool = False,
    label: Callable[[float], str] = human,
) -> str:
    """Draw one metric over tokens, half as wide."""
    curve = run.curve(key)
    top = max(most(curve.y) * 1.25, 0.01 if percent else 0.0) if curve.y else 0.0
    label = _percent if percent else label
    chart = Chart(HALF, 170, extent([run]), (0.0, top or 1.0), label)
    chart.bands(spans(run))
    chart.axes()
    chart.area(thin(curve), "fill")
    chart.line(extremes(curve), "range")
    chart.line(thin(curve), "medium")
    chart.beyond(curve)
    _events(chart, run)
    return chart.text(title)


def compared(runs: Sequence[RunData], key: str, height: float, title: str) -> str:
    """Draw one metric of several runs."""
    curves = [_smooth(run.curve(key)) if key == "loss" else thin(run.curve(key)) for run in runs]
    known = [curve.y for curve in curves if curve.y]
    top = max if key == "lr" else most
    y_range = bounds((y for ys in known for y in (min(ys), top(ys))), zero=key == "lr")
    return _together(runs, curves, WIDE, height, y_range, title, _short if key == "lr" else _plain)


def compared_source(runs: Sequence[RunData], name: str) -> str:
    """Draw the loss of one source in several runs, half as wide."""
    curves = [_smooth(run.source_loss(name)) for run in runs]
    known = [curve.y for curve in curves if curve.y]
    y_range = bounds(y for ys in known for y in (min(ys), most(ys)))
    return _together(runs, curves, HALF, 190, y_range, f"loss of {name}", _plain)


def _together(
    runs: Sequence[RunData],
    curves: Sequence[Curve],
    width: float,
    height: float,
    y_range: tuple[float, float],
    title: str,
    label: Callable[[float], str],
) -> str:
    """Draw a curve of each run, in the runs' colours."""
    chart = Chart(width, height, extent(runs), y_range, label)
    _phases(chart, runs)
    chart.axes()
    for number, curve in enumerate(curves):
        chart.line(curve, "strong", colour(number))
    return chart.text(title)


def _phases(chart: Chart, runs: Sequence[RunData]) -> None:
    """Draw the phases: as bands if all runs have the same, else as a strip for each run."""
    each = [spans(run) for run in runs]
    if all(own == each[0] for own in each):
        chart.bands(each[0])
        return
    for number, (run, own) in enumerate(zip(runs, each, strict=True)):
        chart.phase_strip(number, run.name, own, colour(number))


def difference(runs: Sequence[RunData]) -> str | None:
    """Draw the loss of the other runs minus the loss of the first, at the same tokens."""
    base, *others = (smooth(thin(run.curve("loss")), 9) for run in runs)
    curves = []
    for curve in others:
        pairs = [(x, y - at) for x, y in zip(curve.x, curve.y, strict=True)
                 if (at := _at(base, x)) is not None]  # fmt: skip
        curves.append(Curve([x for x, _ in pairs], [y for _, y in pairs]))
    if not any(curve.x for curve in curves):
        return None
    y_range = bounds([0.0, *(y for curve in curves for y in curve.y)])
    chart = Chart(WIDE, 170, extent(runs), y_range, _plain)
    chart.axes()
    for number, curve in enumerate(curves, start=1):
        chart.line(curve, "medium", colour(number))
    return chart.text("difference of loss")


def _at(curve: Curve, x: float) -> float | None:
    """Return the curve's value at x, interpolated; None outside of the curve."""
    from bisect import bisect_left

    if not curve.x or not curve.x[0] <= x <= curve.x[-1]:
        return None
    place = bisect_left(curve.x, x)
    if curve.x[place] == x:
        return curve.y[place]
    left, right = curve.x[place - 1], curve.x[place]
    part = (x - left) / (right - left)
    return curve.y[place - 1] * (1 - part) + curve.y[place] * part


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-")


def _percent(value: float) -> str:
    return f"{value:.2g}%" if value == 0 else f"{100 * value:.3g}%"
