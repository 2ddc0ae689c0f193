"""Elements of an HTML page: a file that loads nothing, light or dark, at any width."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from ... import __version__
from .style import CSS

WIDE = 1080.0
HALF = 530.0
"""Chart widths: alone in a line, and two in a line."""
PALETTE = (
    "#2b7a9b", "#d9892f", "#5a9e6f", "#b4534f", "#7d6cb3", "#a39136", "#3d9f9f", "#c2689a",
    "#6b7f99", "#8a5a3c", "#8fb04a", "#5a5fc2",
)  # fmt: skip
OPERATORS = ("#456b82", "#7fa3b8", "#b9cdd6", "#c8a46b", "#8b7f71", "#6d8f7d", "#b08a9b")


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def operator_colour(number: int) -> str:
    """Return a muted colour that the palette does not have."""
    return OPERATORS[number % len(OPERATORS)]


def legend(
    names: Sequence[str],
    notes: Sequence[str] = (),
    paint: Callable[[int], str] = colour,
) -> str:
    notes = notes or [""] * len(names)
    keys = [
        f'<span class="key"><i style="background:{paint(number)}"></i>{escape(name)}{note}</span>'
        for number, (name, note) in enumerate(zip(names, notes, strict=True))
    ]
    return f'<div class="legend">{"".join(keys)}</div>'


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return a row of figures from (name, value, note)."""
    figures = "".join(
        f"<div><p>{name}</p><strong>{value}</strong><small>{note}</small></div>"
        for name, value, note in entries
    )
    return f'<div class="tiles">{figures}</div>'


def layer_stripe(names: Sequence[str], note: str) -> str:
    """Return a model as a stripe of cells, one for each layer; equal names share a colour."""
    kinds = list(dict.fromkeys(names))
    cells = "".join(
        f'<i style="background:{operator_colour(kinds.index(name))}" '
        f'title="layer {number}: {escape(name)}"></i>'
        for number, name in enumerate(names)
    )
    return (
        f'<div class="model"><div class="stripe">{cells}</div>'
        f'{legend(kinds, paint=operator_colour)}<span class="count">{note}</span></div>'
    )


def definitions(values: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in values.items())
    return f"<dl>{items}</dl>"


def section(title: str, content: str, legend: str = "", unit: str = "") -> str:
    keys = f'<div class="keys">{legend}</div>' if legend else ""
    measure = f" <small>{unit}</small>" if unit else ""
    return f"<section><div class='head'><h2>{title}{measure}</h2>{keys}</div>{content}</section>"


def comparison_table(head: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]]) -> str:
    """Return a table with a column for each run, from cells in HTML.

    A row is (differs, cells); where the runs differ, its values are bold.
    """
    names = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f'<tr class="{"differs" if differs else ""}"><th>{name}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for differs, (name, *cells) in rows
    )
    return (
        f'<div class="scroll"><table class="sides" style="--columns:{len(head) - 1}"><thead>'
        f"<tr>{names}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def scrolling_table(rows: str, heads: Sequence[str] = (), style: str = "") -> str:
    """Return a table that scrolls on a narrow screen, from rows in HTML."""
    style = f' class="{style}"' if style else ""
    cells = "".join(f"<th>{head}</th>" for head in heads)
    thead = f"<thead><tr>{cells}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table{style}>{thead}<tbody>{rows}</tbody></table></div>'


HINTS = """
function markCut() {
  for (const each of document.querySelectorAll(".scroll"))
    each.classList.toggle("cut", each.scrollWidth > each.clientWidth + 1);
}
addEventListener("resize", markCut);
markCut();
"""
"""Script that shows on a narrow screen what goes on to the right."""


def page(title: str, body: str, *, script: str = "", style: str = "") -> str:
    """Return the page as HTML. It runs this script alone, loads nothing and sends nothing."""
    drawn_at = time.strftime("%Y-%m-%d %H:%M")
    script = f"{script}{{{HINTS}}}"
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · headrace</title><style>{CSS}{style}</style></head>"
        f"<body><main>{body}<footer>headrace {__version__} · drawn {drawn_at}</footer></main>"
        f"<script>{script}</script></body></html>"
    )
