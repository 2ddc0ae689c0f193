"""Embed curves in a report: the board's panels, with their data in the page."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...console.html.page import PALETTE
from ...dataplane.order.plan import Plan
from ...trainer.loop.metrics import HELD_OUT, LOSS_UNIT, list_page_metrics
from ..board.server import STATIC
from .outliers import OutlierStep
from .reading.buckets import CurveTable
from .reading.data import RunData

SCRIPTS = ("plot.js", "panels.js", "report.js")
DEVICE_CURVES = ("mfu", "hfu", "memory")
"""Curves that are omitted if they are zero: then the machine does not count them."""

DIFFERENCE = "difference"
MAX_SMOOTHING = 9
"""Maximum number of buckets in the loss's moving mean: differences between single steps are
noise."""
MIN_WINDOWS = 100
"""Minimum number of moving-mean windows in a curve."""

CONTROLS = '<div class="controls" id="controls"></div><div class="legend" id="runs"></div>'
WIDE = '<div class="panels" id="curves"></div>'
MORE = '<div class="panels" id="more"></div>'
"""Containers that the script fills: controls, wide panels, and further panels."""


def embed_curves(
    runs: Sequence[RunData],
    unit: str,
    outliers: Sequence[OutlierStep] = (),
    *,
    compared: bool = False,
) -> tuple[str, str]:
    """Return a script element with the curves' data, and the script that draws them. With
    `compared`, the curves include the difference in loss to the first run."""
    tables = [table for run in runs for table in _encode_run(run)]
    summaries = {run.name: _summary(run, outliers) for run in runs}
    metrics = list_page_metrics()
    if compared:
        for table in filter(None, (_loss_difference(runs[0], run) for run in runs[1:])):
            tables.append(table)
            summaries[table["run"]]["series"].append(DIFFERENCE)
        title = f"Loss minus the loss of {runs[0].name}"
        metrics.insert(1, {"name": DIFFERENCE, "title": title, "unit": LOSS_UNIT, "wide": True})
    data = {
        "runs": list(summaries.values()),
        "parts": tables,
        "metrics": metrics,
        "palette": PALETTE,
        "unit": unit,
    }
    encoded = json.dumps(data).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{encoded}</script>', _script()


def _script() -> str:
    return "\n".join((STATIC / name).read_text() for name in SCRIPTS)


def style() -> str:
    return (STATIC / "plot.css").read_text()


def _summary(run: RunData, outliers: Sequence[OutlierStep]) -> dict[str, Any]:
    """Return a run as the panels take it, like an entry in the board's run list."""
    table, series = run.table, list(_visible_curves(run.table))
    root = shlex.quote(str(run.folder.root))
    axes = {"step": table.step, "tokens": table.tokens, "hours": table.hours}
    marks = [("resume", step) for step in run.restarts]
    marks += [("skipped", event["step"]) for event in run.skipped]
    return {
        "id": run.name,
        "name": run.name,
        "url": root,
        "audit": f"mixtures audit {root}" if isinstance(run.plan, Plan) else None,
        "entries": run.steps,
        "series": sorted({*series, *run.signals_table.curves}),
        "noise_steps": _noise_steps(run.signals_table),
        "held_out": sorted(run.held_out_table.curves),
        "range": {name: [float(values[0]), float(values[-1])] for name, values in axes.items()},
        "sources": run.sources,
        "marks": [_position(run, step, run.tokens_before(step), kind=kind) for kind, step in marks],
        "phases": [
            _position(run, phase.first_step, phase.first_token, name=phase.name)
            for phase in run.plan.phases
            if phase.first_step <= run.last[-1]["step"]
        ],
        "outliers": [
            _position(run, step.step, step.entry["tokens"], kind="outlier", y=step.entry["loss"])
            for step in outliers
        ],
    }


def _noise_steps(signals: CurveTable) -> int | None:
    """Return how many steps have measured the noise scale, as long as no scale is known."""
    if "noise_steps" not in signals.curves or "noise_scale" in signals.curves:
        return None
    return int(np.nanmax(signals.curves["noise_steps"][2]))  # they only grow


def _position(run: RunData, step: int, tokens: float, **attributes: Any) -> dict[str, Any]:
    """Return a step's position on all axes, and its attributes."""
    hours = float(np.interp(step, run.table.step, run.table.hours))
    return {"step": step, "tokens": tokens, "hours": hours, **attributes}


def _visible_curves(table: CurveTable) -> dict[str, tuple[Any, Any, Any]]:
    return {
        name: values
        for name, values in table.curves.items()
        if name not in DEVICE_CURVES or np.nanmax(values[2]) > 0
    }


def _encode_run(run: RunData) -> list[dict[str, Any]]:
    tables = [_encode_table(run.name, run.table, _visible_curves(run.table))]
    if len(run.signals_table.step):
        tables.append(_encode_table(run.name, run.signals_table, run.signals_table.curves))
    held_out = run.held_out_table
    if len(held_out.step):
        curves = {HELD_OUT + name: values for name, values in held_out.curves.items()}
        tables.append(_encode_table(run.name, held_out, curves))
    return tables


def _encode_table(
    run_id: str, table: CurveTable, curves: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Encode a table for the panels. A curve has its mean alone if each bucket is a single step,
    or if it counts rows; else minimum and maximum too."""
    single = bool((table.first == table.last).all())
    return {
        "run": run_id,
        "step": _base64(table.step),
        "tokens": _base64(table.tokens),
        "hours": _base64(table.hours),
        "first": _base64(table.first),
        "last": _base64(table.last),
        "curves": {
            name: list(map(_base64, values[:1] if single or "rows/" in name else values))
            for name, values in curves.items()
        },
    }


def _base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _loss_difference(base_run: RunData, run: RunData) -> dict[str, Any] | None:
    """Return the run's smoothed loss minus the base run's, at the same tokens; None if the runs
    share no tokens."""
    base, table = base_run.table, run.table
    overlap = (table.tokens >= base.tokens[0]) & (table.tokens <= base.tokens[-1])
    if not overlap.any() or not np.isfinite(base.mean("loss")).any():
        return None
    shorter = min(len(base.tokens), len(table.tokens))
    width = min(MAX_SMOOTHING, shorter // MIN_WINDOWS) | 1
    base_loss, loss = _smooth(base.mean("loss"), width), _smooth(table.mean("loss"), width)
    known = np.isfinite(base_loss)
    base_at_tokens = np.interp(table.tokens, base.tokens[known], base_loss[known])
    values = np.where(overlap, loss - base_at_tokens, np.nan).astype(np.float32)
    return _encode_table(run.name, table, {DIFFERENCE: (values, values, values)})


def _smooth(values: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float64]:
    """Return the moving mean over finite values; NaN where the value is not finite."""
    known = np.isfinite(values).astype(np.float64)
    kernel = np.ones(width)
    total = np.convolve(np.nan_to_num(values.astype(np.float64)), kernel, "same")
    count = np.convolve(known, kernel, "same")
    mean = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    return np.where(known > 0, mean, np.nan)
