"""Tables of Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
