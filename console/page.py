"""A page as a file: Markdown, or the same as HTML in one file without scripts. The ending decides.

The pages are our own: headings, paragraphs, tables, code, and blocks of code. Every text in them is
escaped. A library for Markdown would also make links and emphasis of the texts of documents.
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
OTHER = ("|", "#", "```")
"""Beginnings of lines that are no part of a paragraph."""
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
    """Add the option `--out` of a command that writes a page."""
    option = click.option(
        "--out",
        metavar="FILE.md|FILE.html",
        callback=lambda _ctx, _parameter, out: _checked(out),
        help="Write to this file instead of stdout: Markdown or HTML, by its ending.",
    )
    return option(function)


def render_file(page: str, out: str) -> bytes:
    """Return the content of the file `out` for a page of Markdown."""
    return (render_html(page) if out.lower().endswith(".html") else page).encode()


def render_html(page: str) -> str:
    """Return a page of Markdown as HTML."""
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
    """Yield the elements of lines of Markdown."""
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
            count = _while(lines, lambda line: line.startswith("|"))
            yield from _table(lines[:count])
            lines = lines[count:]
        elif first:
            count = 1 + _while(lines[1:], lambda line: bool(line) and not line.startswith(OTHER))
            breaks = ("<br>" if line.endswith("  ") else "" for line in lines[:count])
            texts = (_text(line) + mark for line, mark in zip(lines[:count], breaks, strict=True))
            yield f"<p>{chr(10).join(texts)}</p>"
            lines = lines[count:]
        else:
            lines = lines[1:]


def _while(lines: list[str], holds: Callable[[str], bool]) -> int:
    """Return the number of lines before the first one for which `holds` is false."""
    return next((number for number, line in enumerate(lines) if not holds(line)), len(lines))


def _table(lines: list[str]) -> Iterator[str]:
    head, rule, *rows = ([cell.strip() for cell in _cells(line)] for line in lines)
    marks = [' class="number"' if mark.endswith(":") else "" for mark in rule]
    yield "<div><table>"
    for tag, cells in [("th", head), *(("td", row) for row in rows)]:
        if any(cells):  # a table of names and values has an empty head
            made = (
                f"<{tag}{mark}>{_text(cell)}</{tag}>"
                for mark, cell in zip(marks, cells, strict=True)
            )
            yield f"<tr>{''.join(made)}</tr>"
    yield "</table></div>"


def _cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|").removesuffix("|")
    return [cell.replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inside)]


def _text(text: str) -> str:
    """Return a line of text, escaped, with its code."""
    return CODE.sub(r"<code>\1</code>", html.escape(text.strip()))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table. Numbers are aligned to the right."""
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
    """Return a value as the text of a cell, in which no character ends the cell."""
    return " ".join(str(value).replace("|", "\\|").split())
