"""Draw the curves of a plan as one picture: PNG, SVG, or a self-contained HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...console.errors import ConfigError, Problem
from ...console.progress import human
from ...dataplane.storage import storage
from .curves import Curves, PhaseSpan

KINDS = ("png", "svg", "html")
COLOURS = (
    "#3b6fb6", "#e08a3c", "#4a9d6e", "#c4545e", "#8166b0", "#3fa7b5",
    "#b8873b", "#d277a4", "#6d7f94", "#8fb04a", "#5a5fc2", "#a3a3a3",
)  # fmt: skip
LETTER = 0.0095
"""Width of a letter of a phase's name, as a fraction of the panel's width."""
SMALL = 0.84
"""Size of the row lengths below the names."""
INK, FAINT, BAND = "#2b2f36", "#8a919c", "#f3f5f8"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c9ced6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.hashsalt": "headrace",
    "svg.fonttype": "none",
}
VARIABLES = {
    INK: "ink", FAINT: "faint", BAND: "band", "#c9ced6": "edge", "#e3e7ec": "grid",
    "#ffffff": "paper",
}  # fmt: skip
"""Colours of a picture that a page shows in its own light or dark variant."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --paper: #ffffff; --ink: #2b2f36; --faint: #8a919c;
  --band: #f3f5f8; --edge: #c9ced6; --grid: #e3e7ec; }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #12181c; --ink: #e6ebee;
  --faint: #93a0a8; --band: #1e272c; --edge: #47545c; --grid: #2c363c; }} }}
body {{ margin: 2rem auto; max-width: 66rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }}
.scroll {{ overflow-x: auto; }}
td i {{ display: inline-block; width: .7em; height: .7em; margin-right: .5em; }}
.hint {{ display: none; color: var(--faint); font-size: .8rem; }}
@media (max-width: 42rem) {{ .hint {{ display: block; }} th, td {{ padding: .25rem .5rem; }}
  td {{ white-space: nowrap; }} }}
h1 {{ font-size: 1.3rem; }}
svg {{ width: 100%; min-width: 40rem; height: auto; }}
table {{ border-collapse: collapse; margin-top: 1.5rem; }}
th, td {{ padding: .25rem .9rem; text-align: right; border-bottom: 1px solid var(--grid); }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ font-weight: 600; color: var(--faint); }}
</style></head><body>
<h1>{title}</h1>
<div class="scroll">{figure}</div>
<div class="hint">swipe sideways for the rest →</div>
<div class="scroll"><table><tr><th>phase</th><th>tokens</th><th>tokens of a row</th></tr>
{phases}
</table></div>
<div class="scroll"><table>
<tr><th>source</th><th>tokens</th><th>share</th><th>total epochs</th></tr>
{rows}
</table></div></body></html>
"""


def kind_of(file: str) -> str:
    """Return the format of a picture, from the ending of its file name."""
    kind = Path(file).suffix.removeprefix(".").lower()
    if kind not in KINDS:
        what = f"{file} does not end in .png, .svg or .html"
        raise ConfigError("the command line", [Problem("--out", what, typed=True)])
    return kind


def draw(curves: Curves, file: str) -> None:
    """Write the curves to a file or URL, in the format of its ending."""
    kind = kind_of(file)
    image = _picture(curves, "svg" if kind == "html" else kind)
    storage.write(file, _page(curves, image.decode()).encode() if kind == "html" else image)


def _picture(curves: Curves, kind: str) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure, (strip, *panels) = pyplot.subplots(
            5,
            1,
            figsize=(10.5, 9.8),
            sharex=True,
            height_ratios=(0.62, 3, 1.6, 2.4, 2.4),
            layout="constrained",
        )
        try:
            _draw_names(strip, curves)
            _draw_shares(panels[0], curves)
            _draw_rates(panels[1], curves)
            _draw_lines(panels[2], curves, curves.taken, human)
            _draw_epochs(panels[3], curves)
            titles = ("share of the tokens", "learning rate, in multiples of the peak",
                      "tokens taken", "epochs")  # fmt: skip
            for panel, title in zip(panels, titles, strict=True):
                panel.set_title(title, loc="left", fontsize=10, color=INK)
                _draw_phases(panel, curves)
            for axis in (panels[2].yaxis, panels[3].xaxis):
                axis.set_major_formatter(lambda value, _: human(float(value)))
            panels[3].set_xlabel("tokens")
            panels[3].set_xlim(curves.phases[0].first_token, curves.phases[-1].last_token)
            figure.legend(
                *panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9.5
            )
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(out, format=kind, dpi=160, metadata=metadata)
        finally:
            pyplot.close(figure)
    return out.getvalue()


def _colours(curves: Curves) -> Sequence[str]:
    return COLOURS[: len(curves.sources)]


def _draw_shares(panel: Any, curves: Curves) -> None:
    """Stack the shares: a source that grows visibly takes its share from others."""
    edges = curves.share_edges
    twice = [token for token in edges for _ in (0, 1)][1:-1]
    panel.stackplot(
        twice,
        [[share for share in source for _ in (0, 1)] for source in curves.shares],
        labels=curves.sources,
        colors=_colours(curves),
        linewidth=0.6,
        edgecolor="white",
        zorder=2,
    )
    panel.set_ylim(0, 1)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _draw_rates(panel: Any, curves: Curves) -> None:
    panel.plot(curves.lr_tokens, curves.lr, color=INK, linewidth=1.6)
    panel.fill_between(curves.lr_tokens, curves.lr, color=INK, alpha=0.06, linewidth=0)
    panel.set_ylim(0, max(1.0, *curves.lr) * 1.08)


def _draw_lines(
    panel: Any,
    curves: Curves,
    lines: Sequence[Sequence[float]],
    show: Callable[[float], str],
    *,
    room_for: float = 0.0,
) -> None:
    """Draw a line for each source, with its last value at the end."""
    top = max(room_for, *(max(line) for line in lines)) * 1.08
    panel.set_ylim(0, top)
    for line, colour in zip(lines, _colours(curves), strict=True):
        panel.plot(curves.tokens, line, color=colour, linewidth=1.8, solid_capstyle="round")
    ends = [line[-1] for line in lines]
    for end, place, colour in zip(ends, _apart(ends, 0.075 * top), _colours(curves), strict=True):
        panel.annotate(
            show(end),
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=colour,
        )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights up and down until neighbours are about `gap` apart."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = [heights[index] for index in order]
    for _ in range(50):
        for low in range(len(placed) - 1):
            short = gap - (placed[low + 1] - placed[low])
            if short > 0:
                placed[low] = max(placed[low] - short / 2, 0)
                placed[low + 1] = max(placed[low + 1] + short / 2, placed[low] + gap)
    by_index = dict(zip(order, placed, strict=True))
    return [by_index[index] for index in range(len(heights))]


def _draw_epochs(panel: Any, curves: Curves) -> None:
    """Draw the epochs of each source, and its `max_epochs` if it comes near."""
    near: dict[int, list[str]] = {}
    for name, line, cap in zip(curves.sources, curves.epochs, curves.max_epochs, strict=True):
        if cap is not None and line[-1] > 0.6 * cap:
            near.setdefault(cap, []).append(name)
    _draw_lines(
        panel, curves, curves.epochs, lambda value: f"{value:.2f}", room_for=max(near, default=0)
    )
    for cap, names in near.items():
        panel.axhline(cap, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        panel.annotate(
            f"{', '.join(names)}: max_epochs {cap}",
            (0, cap),
            xycoords=("axes fraction", "data"),
            xytext=(6, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=FAINT,
        )


def _draw_phases(panel: Any, curves: Curves) -> None:
    for number, phase in enumerate(curves.phases):
        if number % 2:
            panel.axvspan(phase.first_token, phase.last_token, color=BAND, zorder=0, linewidth=0)
        if number:
            panel.axvline(phase.first_token, color=FAINT, linewidth=0.8, zorder=3)


def _draw_names(strip: Any, curves: Curves) -> None:
    """Write the names of the phases, and the lengths of their rows, into a strip above the panels.

    Neighbouring phases that are too narrow for their names share one label: first … last.
    """
    strip.set_axis_off()
    strip.set_ylim(0, 1)
    first, last = curves.phases[0].first_token, curves.phases[-1].last_token
    letter = LETTER * (last - first)

    def narrow(phase: PhaseSpan) -> bool:
        return phase.last_token - phase.first_token < letter * len(phase.phase)

    groups: list[list[PhaseSpan]] = []
    for is_narrow, members in groupby(curves.phases, narrow):
        phases = list(members)
        groups += [phases] if is_narrow else [[phase] for phase in phases]
    before, high = float(first), False
    for group in groups:
        start, end = group[0].first_token, group[-1].last_token
        text = group[0].phase if len(group) == 1 else f"{group[0].phase} … {group[-1].phase}"
        rows = _row_lengths(group)
        width = letter * max(len(text), SMALL * len(rows))
        left = min(max((start + end) / 2 - width / 2, first), last - width)
        high = not high and left < before
        before = left + width
        middle, bottom = left + width / 2, 0.52 if high else 0.0
        words = {"ha": "center", "va": "bottom"}
        strip.text(middle, bottom + 0.26, text, fontsize=9.5, color=INK, **words)
        strip.text(middle, bottom, rows, fontsize=9.5 * SMALL, color=FAINT, **words)


def _row_lengths(phases: Sequence[PhaseSpan]) -> str:
    """Return the shortest and the longest row of some phases."""
    lengths = sorted({phase.seq_len for phase in phases})
    ends = dict.fromkeys((lengths[0], lengths[-1]))
    return f"rows of {' to '.join(f'{length:,}' for length in ends)}"


def _page(curves: Curves, figure: str) -> str:
    total = curves.phases[-1].last_token - curves.phases[0].first_token
    # The legend is out of sight on a phone, so the table has the colours too.
    sources = zip(_colours(curves), curves.sources, curves.taken, curves.epochs, strict=True)
    cells = [
        (
            f'<i style="background:{colour}"></i>{html.escape(name)}',
            human(taken[-1]),
            f"{taken[-1] / total:.2%}",
            f"{epochs[-1]:.3f}",
        )
        for colour, name, taken, epochs in sources
    ]
    phases = [
        (
            html.escape(phase.phase),
            human(phase.last_token - phase.first_token),
            f"{phase.seq_len:,}",
        )
        for phase in curves.phases
    ]
    title = f"A mixture of {human(total)} tokens"
    svg = figure[figure.index("<svg") :]
    for colour, name in VARIABLES.items():
        svg = svg.replace(f": {colour}", f": var(--{name})")
    return PAGE.format(title=title, figure=svg, phases=_table_rows(phases), rows=_table_rows(cells))


def _table_rows(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
