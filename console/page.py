"""Pages in Markdown, or as one HTML file without scripts; the file's ending decides.

Pages hold headings, paragraphs, tables, code and code blocks, and all text is escaped. A Markdown
library would also turn a corpus's text into links and emphasis.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

ENDINGS = (".md", ".html")
HEADING = re.compile(r"(#{1,6}) (.*)")
CODE = re.compile(r"`([^`]+)`")
BLOCK_STARTS = ("|", "#", "```")
"""Beginnings of lines that end a paragraph."""
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
h2 { margin-top: 2rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #d0d7de; text-align: left;
  vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
pre { padding: .75rem; background: #f6f8fa; overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117; }
  th, td { border-color: #30363d; }
  pre { background: #161b22; }
}
"""


def out_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--out` to a command that writes a page."""
    option = click.option(
        "--out",
        metavar="FILE.md|FILE.html",
        callback=lambda _ctx, _parameter, out: _checked(out),
        help="Write to this file instead of stdout: Markdown or HTML, by its ending.",
    )
    return option(function)


def render_file(page: str, out: str) -> bytes:
    """Return the bytes of the file `out` for a Markdown page."""
    return (render_html(page) if out.lower().endswith(".html") else page).encode()


def render_html(page: str) -> str:
    """Return a Markdown page as HTML."""
    title = re.sub(r"^#+ ", "", page.split("\n", 1)[0])
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            *_blocks(page.splitlines()),
            "</html>\n",
        ]
    )


def _checked(out: str | None) -> str | None:
    if out is not None and not out.lower().endswith(ENDINGS):
        raise click.BadParameter(f"{out} does not end in .md or .html")
    return out


def _blocks(lines: list[str]) -> Iterator[str]:
    """Yield HTML elements for Markdown lines."""
    while lines:
        first = lines[0]
        if first.startswith("```"):
            fence = first[: len(first) - len(first.lstrip("`"))]
            end = lines.index(fence, 1) if fence in lines[1:] else len(lines)
            yield f"<pre>{html.escape(chr(10).join(lines[1:end]))}</pre>"
            lines = lines[end + 1 :]
        elif heading := HEADING.fullmatch(first):
            level = len(heading[1])
            yield f"<h{level}>{_text(heading[2])}</h{level}>"
            lines = lines[1:]
        elif first.startswith("|"):
            count = _count_while(lines, lambda line: line.startswith("|"))
            yield from _table(lines[:count])
            lines = lines[count:]
        elif first:
            count = 1 + _count_while(
                lines[1:], lambda line: bool(line) and not line.startswith(BLOCK_STARTS)
            )
            breaks = ("<br>" if line.endswith("  ") else "" for line in lines[:count])
            texts = (_text(line) + mark for line, mark in zip(lines[:count], breaks, strict=True))
            yield f"<p>{chr(10).join(texts)}</p>"
            lines = lines[count:]
        else:
            lines = lines[1:]


def _count_while(lines: list[str], holds: Callable[[str], bool]) -> int:
    """Count the leading lines for which `holds` is true."""
    return next((number for number, line in enumerate(lines) if not holds(line)), len(lines))


def _table(lines: list[str]) -> Iterator[str]:
    head, rule, *rows = ([cell.strip() for cell in _cells(line)] for line in lines)
    classes = [' class="number"' if mark.endswith(":") else "" for mark in rule]
    yield "<div><table>"
    for tag, cells in [("th", head), *(("td", row) for row in rows)]:
        if any(cells):  # a table of names and values has an empty head
            elements = (
                f"<{tag}{style}>{_text(cell)}</{tag}>"
                for style, cell in zip(classes, cells, strict=True)
            )
            yield f"<tr>{''.join(elements)}</tr>"
    yield "</table></div>"


def _cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|").removesuffix("|")
    return [cell.replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inside)]


def _text(text: str) -> str:
    """Return a line of text as HTML: escaped, with code elements."""
    return CODE.sub(r"<code>\1</code>", html.escape(text.strip()))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a Markdown table's lines; columns of numbers are aligned to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    numbers = [bool(cells) and all(row[k][:1].isdigit() for row in cells) for k in range(len(head))]
    return [
        _line(head),
        _line("--:" if number else "---" for number in numbers),
        *map(_line, cells),
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    """Return a value as cell text, with `|` escaped."""
    return " ".join(str(value).replace("|", "\\|").split())
