"""Measurements as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...console.errors import MisuseError
from ...console.html.chart import BOTTOM, LINE, Chart, Curve, bounds
from ...console.html.page import HALF, colour
from ...console.html.picture import draw_picture
from ...console.progress import format_number
from ...dataplane.storage import storage

Row = Mapping[str, Any]


def format_table(rows: Sequence[Row]) -> str:
    """Align the columns."""
    columns = list(rows[0])
    cells = [columns, *([_format_value(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column_cells)) for column_cells in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if number == 0 else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def write_csv(rows: Sequence[Row], file: str) -> None:
    """Write rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    storage.write(file, text.getvalue().encode())


def check_outputs(*files: str | None, drawing: str | None = None) -> None:
    """Raise unless files and a drawing can be written at these paths."""
    for path in (*files, drawing):
        if path is None:
            continue
        if not Path(path).parent.is_dir():
            raise MisuseError(f"the folder of {path} does not exist", hint="create it")
        if Path(path).is_dir():
            raise MisuseError(f"{path} is a folder", hint="name a file in it")
        storage.check_writable(path, file=True)
    if drawing is not None and Path(drawing).suffix.lower() != ".svg":
        raise MisuseError(f"{drawing} is no picture", hint="end it in .svg")


def draw(
    rows: Sequence[Row], file: str, *, line: str, panel: str, across: str, shown: Sequence[str]
) -> None:
    """Draw the columns `shown` as curves over the column `across`, both axes logarithmic.

    The columns `line` and `panel` tell curves and panels apart; every shown column is a row of
    panels.
    """
    panels = list(dict.fromkeys(row[panel] for row in rows))
    keys = [str(name) for name in dict.fromkeys(row[line] for row in rows)]
    grid = [
        [
            (f"{column}, {panel} {value}", _chart(rows, column, across, (panel, value), line, keys))
            for value in panels
        ]
        for column in shown
    ]
    storage.write(file, draw_picture(grid, keys, f"{', '.join(shown)} by {across}").encode())


def _chart(
    rows: Sequence[Row],
    column: str,
    across: str,
    panel: tuple[str, Any],
    line: str,
    keys: Sequence[str],
) -> Chart:
    """Draw a column's curves in one panel. All panels with this column share the y axis."""
    panel_column, panel_value = panel
    powers = [math.log2(row[across]) for row in rows]
    heights = [math.log10(row[column]) for row in rows if row[column] > 0]
    chart = Chart(
        HALF, 200, bounds(powers), bounds(heights), lambda y: f"{10**y:.3g}",
        bottom=BOTTOM + LINE, x_label=lambda x: format_number(round(2**x)), x_unit=across,
        x_places=sorted(set(powers)),
    )  # fmt: skip
    chart.axes()
    for number, key in enumerate(keys):
        points = sorted(
            (math.log2(row[across]), math.log10(row[column]))
            for row in rows
            if row[panel_column] == panel_value and str(row[line]) == key and row[column] > 0
        )
        curve = Curve([x for x, _ in points], [y for _, y in points])
        chart.line(curve, "medium", colour(number))
    return chart


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
