"""Parts of a run's page beside its curves: plan, rows taken, layout, checkpoints, history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...console.errors import UserError
from ...dataplane.storage import storage
from ...trainer.checkpoints import store
from ...trainer.folders import folder as files
from ...trainer.scores import records
from .byte_sizes import converted
from .runs import SKIPPED, STARTS, BoardRun, entry_with

MOST_EVENTS = 400
MOST_MARKS = 400
MOST_STRETCHES = 400
MOST_COLUMNS = 240
MEMORY = ("memory", "measured")
"""Events with the memory of each rank."""
LEFT_OUT = ("checkpoint", "memory")
"""Events that other parts of the page show."""
AXES = ("pp", "dp", "cp", "tp")
"""Axes of the grid of ranks, the one whose neighbours are farthest apart first."""


def summary(run: BoardRun) -> dict[str, Any]:
    """Return a run's line in the list, and the names of its curves."""
    metrics, last = run.metrics, {}
    entries = metrics.index.entries
    if entries:
        last = metrics.line(entries - 1) or {}
    return {
        "id": run.id,
        "number": run.number,
        "url": run.url,
        "status": run.status,
        "missing": [
            {
                "text": each.sentence(),
                "command": each.command(run.url) if storage.is_local(run.url) else None,
            }
            for each in run.missing
        ],
        "problem": run.problem,
        "version": run.version,
        "entries": entries,
        "evaluations": run.evaluations.index.entries,
        "read": 1.0 if not metrics.size else metrics.index.offset / metrics.size,
        "step": int(last["step"]) + 1 if last else None,
        "last_step": run.last_step,
        "tokens": last.get("tokens"),
        "loss": last.get("loss"),
        "bits": converted(last, run.sizes.trained)["loss"] if last and run.sizes else None,
        "tokenizer": run.tokenizer,
        "bytes_known": run.sizes is not None,
        "bytes_problem": run.sizes_problem,
        "tokens_per_second": last.get("tokens_per_second"),
        "series": sorted({*metrics.index.series, *run.signals.index.series}),
        "noise_steps": _noise_steps(run),
        "held_out": sorted(run.evaluations.index.series),
        "range": {axis: _range(run, axis) for axis in ("step", "tokens", "hours")},
        "sources": [source["name"] for source in run.plan["sources"]] if run.plan else [],
        "marks": marks(run),
        "phases": phases(run),
    }


def _noise_steps(run: BoardRun) -> int | None:
    """Return the steps that measured the noise scale, while none of them has one."""
    series = run.signals.index.series
    if "noise_steps" not in series or "noise_scale" in series:
        return None
    window = run.signals.window(["noise_steps"], "step", -np.inf, np.inf, 1)
    return int(np.nanmax(window.curves["noise_steps"][2]))  # they only grow


def _range(run: BoardRun, axis: str) -> list[float]:
    x = run.metrics.axis(axis)
    return [float(x[0]), float(x[-1])] if len(x) else []


def marks(run: BoardRun) -> list[dict[str, Any]]:
    """Return the places of restarts and skipped steps on all axes."""
    found = [each for each in run.events if each["event"] in ("resume", *SKIPPED)][-MOST_MARKS:]
    return [
        {"kind": "resume" if each["event"] == "resume" else "skipped", **_place(run, each["step"])}
        for each in found
    ]


def phases(run: BoardRun) -> list[dict[str, Any]]:
    """Return the phases, and the places on all axes where they begin."""
    if run.plan is None:
        return []
    return [
        {"name": phase["name"], **_place(run, phase["first_step"])} for phase in run.plan["phases"]
    ]


def _place(run: BoardRun, step: int) -> dict[str, float | None]:
    """Return the axes' values of a step; None for one that is not taken yet."""
    steps = run.metrics.axis("step")
    entry = int(np.searchsorted(steps, step))
    inside = entry < len(steps)
    return {
        "step": step,
        "tokens": float(run.metrics.axis("tokens")[entry]) if inside else None,
        "hours": float(run.metrics.axis("hours")[entry]) if inside else None,
    }


def details(run: BoardRun) -> dict[str, Any]:
    return {
        "files": [name for name in FILES if storage.exists(storage.join(run.url, name))],
        "plan": plan(run),
        "plan_problem": run.plan_problem,
        "layout": layout(run),
        "checkpoints": list(checkpoints(run)),
        "scores": list(scores(run)),
        "events": [_shown(each) for each in run.events if each["event"] not in LEFT_OUT][
            -MOST_EVENTS:
        ],
    }


def scores(run: BoardRun) -> Iterator[dict[str, Any]]:
    """Yield the scores of the run's checkpoints as text: by step, task and metric, where several
    evaluations have one, the last."""
    for entry in run.scores:
        for (task, metric), value in records.values(entry).items():
            yield {"step": entry["step"], "task": task, "metric": metric, "value": value}
    for entry in _recalled(run):
        for task, metric, value in records.recalled(entry):
            yield {"step": entry["step"], "task": task, "metric": metric, "value": value}


def _recalled(run: BoardRun) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of what checkpoints recall."""
    file = storage.join(run.url, files.RECALL)
    data = storage.read(file) if storage.exists(file) else b""
    for line in data.splitlines(keepends=True):
        if entry := entry_with(line, ("step", "tasks")):
            yield entry


FILES = (
    files.RUN,
    files.MODEL,
    files.MIXTURE,
    files.PLAN,
    files.LAYOUT,
    files.MEASURED,
    files.EVENTS,
    files.EVALUATIONS,
    files.SCORES,
    files.RECALL,
)
"""Files of a run that the page shows as they are."""


def plan(run: BoardRun) -> dict[str, Any] | None:
    """Return the planned shares of each phase, as stretches over tokens, beside the rows taken."""
    if run.plan is None:
        return None
    names = [source["name"] for source in run.plan["sources"]]
    return {
        "sources": names,
        "urls": [source["url"] for source in run.plan["sources"]],
        "phases": [
            {
                "name": phase["name"],
                "first_token": phase["first_token"],
                "tokens": phase["rows"] * phase["seq_len"],
                "seq_len": phase["seq_len"],
                "batch_rows": phase["batch_rows"],
                "stretches": _stretches(phase),
                "planned": _mean_shares(phase, len(names)),
                "taken": _taken(run, phase, names),
            }
            for phase in run.plan["phases"]
        ],
        "taken": _taken_over_tokens(run, names),
    }


def _taken_over_tokens(run: BoardRun, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return (tokens, shares) of the steps so far, in columns of equally many steps."""
    series = [f"rows/{name}" for name in names]
    window = run.metrics.window(series, "step", -np.inf, np.inf, MOST_COLUMNS)
    if not len(window.x) or run.plan is None:
        return []
    last = np.searchsorted(run.metrics.axis("step"), window.last)
    ends = np.asarray(run.metrics.axis("tokens"))[last]
    tokens = np.diff(ends, prepend=run.plan["phases"][0]["first_token"])
    none = np.zeros(len(ends), np.float32)
    rows = np.stack([window.curves.get(name, (none,))[0] for name in series], axis=1)
    rows = np.nan_to_num(rows.astype(np.float64))
    shares = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-9)
    return [
        {"tokens": each, "shares": own}
        for each, own in zip(tokens.tolist(), shares.tolist(), strict=True)
    ]


def _stretches(phase: dict[str, Any]) -> list[dict[str, Any]]:
    """Return (tokens, shares) of stretches of constant weights, neighbours joined if many."""
    stretches = phase["stretches"]
    group = max(1, -(-len(stretches) // MOST_STRETCHES))
    joined = [stretches[first : first + group] for first in range(0, len(stretches), group)]
    return [
        {
            "tokens": sum(each["rows"] for each in part) * phase["seq_len"],
            "shares": _shares(part),
        }
        for part in joined
    ]


def _shares(stretches: Sequence[dict[str, Any]]) -> list[float]:
    rows = np.array([each["rows"] for each in stretches], np.float64)
    weights = np.array([each["weights"] for each in stretches], np.float64)
    shares = rows @ (weights / weights.sum(axis=1, keepdims=True)) / rows.sum()
    return [float(share) for share in shares]


def _mean_shares(phase: dict[str, Any], sources: int) -> list[float]:
    return _shares(phase["stretches"]) if phase["stretches"] else [0.0] * sources


def _taken(run: BoardRun, phase: dict[str, Any], names: Sequence[str]) -> list[float]:
    """Return the rows that the run has taken from each source in a phase."""
    metrics = run.metrics
    steps = metrics.axis("step")
    last = phase["first_step"] + phase["rows"] // phase["batch_rows"]
    first, end = (int(np.searchsorted(steps, step)) for step in (phase["first_step"], last))
    if first == end:
        return [0.0] * len(names)
    series = [f"rows/{name}" for name in names]
    return [
        float(np.nansum(metrics.values(name, first, end), dtype=np.float64))
        if name in metrics.index.series
        else 0.0
        for name in series
    ]


def layout(run: BoardRun) -> dict[str, Any]:
    """Return the layout of the last start, the place of each rank in it, and measured memory."""
    starts = [each for each in run.events if each["event"] in STARTS and "layout" in each]
    if not starts:
        return {}
    found = dict(starts[-1]["layout"])
    degrees = [int(found.get(axis, 1)) for axis in AXES]
    count = int(np.prod(degrees))
    places = np.stack(np.unravel_index(np.arange(count), degrees), axis=1).tolist()
    began = run.events.index(starts[-1])
    measured = [each for each in run.events[began:] if each["event"] in MEMORY]
    by_rank = measured[-1]["memory"] if measured else []
    first_rank = None
    entries = run.metrics.index.entries
    if entries and "memory" in run.metrics.index.series:
        first_rank = float(run.metrics.values("memory", entries - 1, entries)[0])
    memory = by_rank or [first_rank]
    return {
        "degrees": found,
        "starts": len(starts),
        "ranks": [
            {
                "rank": rank,
                "place": dict(zip(AXES, place, strict=True)),
                "memory": memory[rank] if rank < len(memory) else None,
            }
            for rank, place in enumerate(places)
        ],
        "measured": measured[-1]["step"] if measured else None,
    }


def checkpoints(run: BoardRun) -> Iterator[dict[str, Any]]:
    """Yield the checkpoints with their state, the newest first."""
    folder = storage.join(run.url, files.CHECKPOINTS)
    saved = {each["step"]: each for each in run.events if each["event"] == "checkpoint"}
    names = [name for name in storage.names(folder) if store.NAME.match(name)]
    for name in sorted(names, key=store.step_of, reverse=True):
        step = store.step_of(name)
        event = saved.get(step, {})
        yield {
            "name": name,
            "step": step,
            "time": event.get("time"),
            "blocked": event.get("blocked"),
            **_state(storage.join(folder, name)),
        }


def _state(checkpoint: str) -> dict[str, Any]:
    """Return the scalars of a checkpoint and its size, or its damage. Who loads it checks the
    hashes."""
    remote = storage.exists(storage.join(checkpoint, store.REMOTE))
    try:
        manifest, state = store.read_manifest(checkpoint), store.read_state(checkpoint)
        if not remote and storage.is_local(checkpoint):
            store.check_sizes(checkpoint, manifest.files)
    except UserError as error:
        return {"problem": error.what}
    return {
        "tokens": state.tokens,
        "row": state.row,
        "updates": state.updates,
        "ledger": state.ledger,
        "layout": state.layout,
        "size": sum(file.size for file in manifest.files),
        "remote": remote,
    }


LISTS = ("memory", "phases", "memory_phases")
"""Keys of events that the list of events leaves out."""


def _shown(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without its lists, which can be as long as the ranks are many."""
    return {key: value for key, value in event.items() if key not in LISTS}
