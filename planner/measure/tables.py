"""Measurements as a table, as CSV and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...console.errors import MissingError, MisuseError
from ...dataplane.storage import storage

PICTURES = (".png", ".svg")
Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Return rows as aligned columns."""
    names = list(rows[0])
    cells = [names, *([_shown(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def write_csv(rows: Sequence[Row], file: str) -> None:
    """Write rows as CSV."""
    storage.write(file, as_csv(rows).encode())


def as_csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def check_outputs(file: str | None, picture: str | None) -> None:
    """Raise unless a file and a picture of these names can be written."""
    for name in (file, picture):
        if name is not None and not Path(name).parent.is_dir():
            raise MisuseError(f"the folder of {name} does not exist", hint="create it")
    if picture is None:
        return
    if Path(picture).suffix.lower() not in PICTURES:
        raise MisuseError(f"{picture} is no picture", hint=f"end it in {' or '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        what = "a picture needs matplotlib, which is not installed"
        raise MissingError(what, hint="pip install matplotlib")


def draw(
    rows: Sequence[Row], file: str, *, line: str, panel: str, across: str, shown: Sequence[str]
) -> None:
    """Draw columns of the rows as curves over the column `across`, both axes logarithmic.

    `line` and `panel` name the columns that tell curves and panels apart; each of `shown` is a row
    of panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ...mixtures.view.plot import COLOURS, STYLE

    panels = list(dict.fromkeys(row[panel] for row in rows))
    lines = list(dict.fromkeys(row[line] for row in rows))
    with matplotlib.rc_context(STYLE):
        size = (1.8 + 3.6 * len(panels), 2.6 * len(shown))
        figure, axes = pyplot.subplots(
            len(shown), len(panels), figsize=size, sharex=True, sharey="row",
            squeeze=False, layout="constrained",
        )  # fmt: skip
        try:
            for row_axes, column in zip(axes, shown, strict=True):
                for axis, value in zip(row_axes, panels, strict=True):
                    for colour, name in zip(COLOURS * len(lines), lines, strict=False):
                        points = [r for r in rows if r[panel] == value and r[line] == name]
                        points.sort(key=lambda point: point[across])
                        axis.plot(
                            [point[across] for point in points],
                            [point[column] for point in points],
                            color=colour, label=str(name), marker="o", markersize=3,
                        )  # fmt: skip
                    axis.set_xscale("log", base=2)
                    axis.set_yscale("log")
                    axis.set_title(f"{panel} {value}", loc="left", fontsize=9)
                row_axes[0].set_ylabel(column)
            for axis in axes[-1]:
                axis.set_xlabel(across)
            figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
            metadata = {"Date": None} if file.lower().endswith(".svg") else None
            picture = io.BytesIO()  # a file that exists stays whole if there is no room for the new
            figure.savefig(picture, dpi=160, metadata=metadata, format=Path(file).suffix[1:])
            storage.write(file, picture.getvalue())
        finally:
            pyplot.close(figure)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
