"""The curves of a report: the board's panels, with their data in the page."""

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
from ...trainer.loop.metrics import HELD_OUT, LOSS_UNIT, for_pages
from ..board.server import STATIC
from .outliers import OutlierStep
from .reading.buckets import Table
from .reading.data import RunData

SCRIPTS = ("plot.js", "panels.js", "report.js")
OF_DEVICES = ("mfu", "hfu", "memory")
"""Curves that are left out where they are zero: the machine does not count them."""

DIFFERENCE = "difference"
SMOOTH = 9
"""Most buckets of the mean from which losses are subtracted: steps alone are noise."""
APART = 100
"""Least length of a curve, in such means."""

CONTROLS = '<div class="controls" id="controls"></div><div class="legend" id="runs"></div>'
WIDE = '<div class="panels" id="curves"></div>'
MORE = '<div class="panels" id="more"></div>'
"""Places of the controls, of the wide panels and of the others."""


def with_curves(
    runs: Sequence[RunData],
    unit: str,
    outliers: Sequence[OutlierStep] = (),
    *,
    compared: bool = False,
) -> tuple[str, str]:
    """Return the data of the curves, and the script that draws them. Of compared runs, the
    difference of their losses is drawn too."""
    parts = [part for run in runs for part in _parts(run)]
    shown = {run.name: _summary(run, outliers) for run in runs}
    metrics = for_pages()
    if compared:
        for part in filter(None, (_difference(runs[0], run) for run in runs[1:])):
            parts.append(part)
            shown[part["run"]]["series"].append(DIFFERENCE)
        title = f"Loss minus the loss of {runs[0].name}"
        metrics.insert(1, {"name": DIFFERENCE, "title": title, "unit": LOSS_UNIT, "wide": True})
    data = {
        "runs": list(shown.values()),
        "parts": parts,
        "metrics": metrics,
        "palette": PALETTE,
        "unit": unit,
    }
    text = json.dumps(data).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>', _script()


def _script() -> str:
    return "\n".join((STATIC / name).read_text() for name in SCRIPTS)


def style() -> str:
    return (STATIC / "plot.css").read_text()


def _summary(run: RunData, outliers: Sequence[OutlierStep]) -> dict[str, Any]:
    """Return a run as the panels need it: as the board's list of runs has it."""
    table, series = run.table, list(_drawn(run.table))
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
        "marks": [_at(run, step, run.tokens_at(step), kind=kind) for kind, step in marks],
        "phases": [
            _at(run, phase.first_step, phase.first_token, name=phase.name)
            for phase in run.plan.phases
            if phase.first_step <= run.last[-1]["step"]
        ],
        "outliers": [
            _at(run, each.step, each.entry["tokens"], kind="outlier", y=each.entry["loss"])
            for each in outliers
        ],
    }


def _noise_steps(signals: Table) -> int | None:
    """Return the steps that measured the noise scale, while none of them has one."""
    if "noise_steps" not in signals.curves or "noise_scale" in signals.curves:
        return None
    return int(np.nanmax(signals.curves["noise_steps"][2]))  # they only grow


def _at(run: RunData, step: int, tokens: float, **more: Any) -> dict[str, Any]:
    """Return a place on all axes."""
    hours = float(np.interp(step, run.table.step, run.table.hours))
    return {"step": step, "tokens": tokens, "hours": hours, **more}


def _drawn(table: Table) -> dict[str, tuple[Any, Any, Any]]:
    """Return the curves that show something."""
    return {
        name: values
        for name, values in table.curves.items()
        if name not in OF_DEVICES or np.nanmax(values[2]) > 0
    }


def _parts(run: RunData) -> list[dict[str, Any]]:
    parts = [_part(run.name, run.table, _drawn(run.table))]
    if len(run.signals_table.step):
        parts.append(_part(run.name, run.signals_table, run.signals_table.curves))
    held_out = run.held_out_table
    if len(held_out.step):
        curves = {HELD_OUT + name: values for name, values in held_out.curves.items()}
        parts.append(_part(run.name, held_out, curves))
    return parts


def _part(id: str, table: Table, curves: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    single = bool((table.first == table.last).all())
    return {
        "run": id,
        "step": _text(table.step),
        "tokens": _text(table.tokens),
        "hours": _text(table.hours),
        "first": _text(table.first),
        "last": _text(table.last),
        "curves": {
            name: [_text(each) for each in (values[:1] if single or "rows/" in name else values)]
            for name, values in curves.items()
        },
    }


def _text(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _difference(base: RunData, run: RunData) -> dict[str, Any] | None:
    """Return the smoothed loss of a run minus that of another, at the same tokens."""
    one, other = base.table, run.table
    inside = (other.tokens >= one.tokens[0]) & (other.tokens <= one.tokens[-1])
    if not inside.any() or not np.isfinite(one.mean("loss")).any():
        return None
    width = min(SMOOTH, len(one.tokens) // APART, len(other.tokens) // APART) | 1
    base_loss, loss = _smooth(one.mean("loss"), width), _smooth(other.mean("loss"), width)
    known = np.isfinite(base_loss)
    there = np.interp(other.tokens, one.tokens[known], base_loss[known])
    values = np.where(inside, loss - there, np.nan).astype(np.float32)
    return _part(run.name, other, {DIFFERENCE: (values, values, values)})


def _smooth(values: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float64]:
    """Return the mean of neighbours, of those that are known."""
    known = np.isfinite(values).astype(np.float64)
    kernel = np.ones(width)
    total = np.convolve(np.nan_to_num(values.astype(np.float64)), kernel, "same")
    count = np.convolve(known, kernel, "same")
    found = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    return np.where(known > 0, found, np.nan)
