"""Draw a plan's curves as one file: an SVG, or a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from ...console.errors import ConfigError, ConfigProblem
from ...console.html.chart import TOP, Chart, Curve, bounds
from ...console.html.page import WIDE, colour, legend, page, scrolling_table, section
from ...console.html.picture import draw_picture
from ...console.progress import format_number
from ...dataplane.storage import storage
from .curves import Curves

FORMATS = ("svg", "html")
HEIGHT = 200.0
Panel = tuple[str, Chart]


def find_format(file: str) -> str:
    """Derive the picture's format from the file name: svg or html."""
    picture_format = Path(file).suffix.removeprefix(".").lower()
    if picture_format not in FORMATS:
        problem = f"{file} does not end in .svg or .html"
        raise ConfigError("the command line", [ConfigProblem("--out", problem, typed=True)])
    return picture_format


def draw(curves: Curves, file: str) -> None:
    """Write the curves to a file or URL as SVG or HTML, by its ending."""
    title = f"A mixture of {format_number(_tokens(curves))} tokens"
    panels = [_shares(curves), _rates(curves), _taken(curves), _epochs(curves)]
    if find_format(file) == "svg":
        text = draw_picture([[panel] for panel in panels], curves.sources, title)
    else:
        text = page(title, _body(curves, title, panels))
    storage.write(file, text.encode())


def _tokens(curves: Curves) -> int:
    return curves.phases[-1].end_token - curves.phases[0].first_token


def _chart(curves: Curves, top: float, label: Callable[[float], str], height: float) -> Chart:
    """Draw a panel's frame, with the phases as background."""
    tokens = (float(curves.phases[0].first_token), float(curves.phases[-1].end_token))
    chart = Chart(WIDE, height, tokens, (0.0, top), label)
    chart.bands(
        (f"{phase.phase}, rows of {phase.seq_len:,}", phase.first_token, phase.end_token)
        for phase in curves.phases
    )
    return chart


def _shares(curves: Curves) -> Panel:
    """Stack the shares, so that a growing source visibly pushes others aside."""
    chart = _chart(curves, 1.0, lambda share: f"{share:.0%}", HEIGHT)
    edges = curves.share_edges
    columns = zip(edges, edges[1:], map(list, zip(*curves.shares, strict=True)), strict=False)
    colours = [colour(number) for number in range(len(curves.sources))]
    chart.strip("", TOP, chart.base - TOP, columns, colours, curves.sources)
    chart.axes()
    return "share of the tokens", chart


def _rates(curves: Curves) -> Panel:
    chart = _chart(curves, max(1.0, *curves.lr) * 1.08, lambda rate: f"{rate:g}", HEIGHT * 0.7)
    chart.axes()
    curve = Curve([float(token) for token in curves.lr_tokens], curves.lr)
    chart.area(curve, "fill")
    chart.line(curve, "medium")
    return "learning rate, in multiples of the peak", chart


def _taken(curves: Curves) -> Panel:
    top = max(line[-1] for line in curves.taken) * 1.08
    chart = _chart(curves, top, format_number, HEIGHT)
    _lines(chart, curves, curves.taken)
    return "tokens taken", chart


def _epochs(curves: Curves) -> Panel:
    """Draw epochs by source, with `max_epochs` where a source comes near."""
    limits: dict[int, list[str]] = {}
    for name, line, limit in zip(curves.sources, curves.epochs, curves.max_epochs, strict=True):
        if limit is not None and line[-1] > 0.6 * limit:
            limits.setdefault(limit, []).append(name)
    _, top = bounds([max(limits, default=0), *(line[-1] for line in curves.epochs)], zero=True)
    chart = _chart(curves, top, lambda epochs: f"{epochs:g}", HEIGHT)
    _lines(chart, curves, curves.epochs)
    for limit, names in limits.items():
        chart.limit(limit, f"{', '.join(names)}: max_epochs {limit}")
    return "epochs", chart


def _lines(chart: Chart, curves: Curves, lines: Sequence[Sequence[float]]) -> None:
    chart.axes()
    tokens = [float(token) for token in curves.tokens]
    for number, line in enumerate(lines):
        chart.line(Curve(tokens, [float(value) for value in line]), "medium", colour(number))


def _body(curves: Curves, title: str, panels: Sequence[Panel]) -> str:
    keys = legend(curves.sources)
    charts = "".join(
        section(name, chart.render(f"{name} over tokens"), keys if chart is panels[0][1] else "")
        for name, chart in panels
    )
    phases = _table(
        ("phase", "tokens", "tokens of a row"),
        (
            (
                escape(phase.phase),
                format_number(phase.end_token - phase.first_token),
                f"{phase.seq_len:,}",
            )
            for phase in curves.phases
        ),
    )
    sources = _table(
        ("source", "tokens", "share", "total epochs"),
        (
            (
                f'<span class="key"><i style="background:{colour(number)}"></i></span>'
                f"{escape(name)}",
                format_number(taken[-1]),
                f"{taken[-1] / _tokens(curves):.2%}",
                f"{epochs[-1]:.3f}",
            )
            for number, (name, taken, epochs) in enumerate(
                zip(curves.sources, curves.taken, curves.epochs, strict=True)
            )
        ),
    )
    return (
        f"<header><h1>{escape(title)}</h1></header>{charts}"
        f"{section('Phases', phases)}{section('Sources', sources)}"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return scrolling_table(body, heads)
