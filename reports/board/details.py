"""Describe a run for the page: plan, rows taken, layout, checkpoints, history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...console.errors import UserError
from ...dataplane.storage import storage
from ...trainer.checkpoints import store
from ...trainer.folders import folder as files
from ...trainer.scores import records
from .byte_sizes import convert_entry
from .runs import SKIPPED, STARTS, BoardRun, parse_entry

MAX_EVENTS = 400
MAX_MARKS = 400
MAX_STRETCHES = 400
MAX_COLUMNS = 240
MEMORY = ("memory", "measured")
"""Events with the memory by rank."""
SHOWN_ELSEWHERE = ("checkpoint", "memory")
"""Events that the page shows elsewhere."""
AXES = ("pp", "dp", "cp", "tp")
"""Axes of the rank grid; neighbours on the first are farthest apart."""


def summary(run: BoardRun) -> dict[str, Any]:
    """Return a run's entry in the run list."""
    metrics, last = run.metrics, {}
    entries = metrics.index.entries
    if entries:
        last = metrics.line(entries - 1) or {}
    return {
        "id": run.id,
        "number": run.number,
        "tags": run.notes.tags,
        "note": run.notes.note,
        "url": run.url,
        "status": run.status,
        "missing": [
            {
                "text": gap.sentence(),
                "command": gap.command(run.url) if storage.is_local(run.url) else None,
            }
            for gap in run.score_gaps
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
        "bits": convert_entry(last, run.sizes.trained)["loss"] if last and run.sizes else None,
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
    """Return how many steps have measured the noise scale, as long as no scale is known."""
    series = run.signals.index.series
    if "noise_steps" not in series or "noise_scale" in series:
        return None
    window = run.signals.window(["noise_steps"], "step", -np.inf, np.inf, 1)
    return int(np.nanmax(window.curves["noise_steps"][2]))  # they only grow


def _range(run: BoardRun, axis: str) -> list[float]:
    x = run.metrics.axis(axis)
    return [float(x[0]), float(x[-1])] if len(x) else []


def marks(run: BoardRun) -> list[dict[str, Any]]:
    """Return the positions of restarts and skipped steps on all axes."""
    events = [event for event in run.events if event["event"] in ("resume", *SKIPPED)]
    return [
        {
            "kind": "resume" if event["event"] == "resume" else "skipped",
            **_position(run, event["step"]),
        }
        for event in events[-MAX_MARKS:]
    ]


def phases(run: BoardRun) -> list[dict[str, Any]]:
    """Return the phases, and the positions on all axes where they begin."""
    if run.plan is None:
        return []
    return [
        {"name": phase["name"], **_position(run, phase["first_step"])}
        for phase in run.plan["phases"]
    ]


def _position(run: BoardRun, step: int) -> dict[str, float | None]:
    """Return a step's position on all axes; tokens and hours are None before it is taken."""
    steps = run.metrics.axis("step")
    entry = int(np.searchsorted(steps, step))
    is_taken = entry < len(steps)
    return {
        "step": step,
        "tokens": float(run.metrics.axis("tokens")[entry]) if is_taken else None,
        "hours": float(run.metrics.axis("hours")[entry]) if is_taken else None,
    }


def details(run: BoardRun) -> dict[str, Any]:
    """Return what the page shows about a run besides its curves."""
    events = [event for event in run.events if event["event"] not in SHOWN_ELSEWHERE]
    return {
        "files": [name for name in FILES if storage.exists(storage.join(run.url, name))],
        "plan": plan(run),
        "plan_problem": run.plan_problem,
        "layout": layout(run),
        "checkpoints": list(checkpoints(run)),
        "scores": list(scores(run)),
        "events": [_without_lists(event) for event in events[-MAX_EVENTS:]],
    }


def scores(run: BoardRun) -> Iterator[dict[str, Any]]:
    """Yield the checkpoints' scores, by step, task and metric: as text, and as a number with its
    place on all axes. A later score with the same three replaces an earlier one."""
    listed = [(entry, records.list_scores(entry)) for entry in run.scores]
    listed += [(entry, records.list_recall(entry)) for entry in _recalled(run)]
    for entry, entry_scores in listed:
        place = {**_position(run, entry["step"] - 1), "step": entry["step"]}
        for task, metric, text, number in entry_scores:
            yield {**place, "task": task, "metric": metric, "value": text, "number": number}


def _recalled(run: BoardRun) -> Iterator[dict[str, Any]]:
    """Yield the valid lines in recall.jsonl."""
    file = storage.join(run.url, files.RECALL)
    data = storage.read(file) if storage.exists(file) else b""
    for line in data.splitlines(keepends=True):
        if entry := parse_entry(line, ("step", "tasks")):
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
"""Files that the page shows as they are."""


def plan(run: BoardRun) -> dict[str, Any] | None:
    """Return planned shares and taken rows by phase; planned shares are stretches over tokens."""
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
    """Return (tokens, shares) for columns with equally many steps."""
    series = [f"rows/{name}" for name in names]
    window = run.metrics.window(series, "step", -np.inf, np.inf, MAX_COLUMNS)
    if not len(window.x) or run.plan is None:
        return []
    last_entries = np.searchsorted(run.metrics.axis("step"), window.last)
    ends = np.asarray(run.metrics.axis("tokens"))[last_entries]
    column_tokens = np.diff(ends, prepend=run.plan["phases"][0]["first_token"])
    zeros = np.zeros(len(ends), np.float32)
    rows = np.stack([window.curves.get(name, (zeros,))[0] for name in series], axis=1)
    rows = np.nan_to_num(rows.astype(np.float64))
    column_shares = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-9)
    return [
        {"tokens": tokens, "shares": shares}
        for tokens, shares in zip(column_tokens.tolist(), column_shares.tolist(), strict=True)
    ]


def _stretches(phase: dict[str, Any]) -> list[dict[str, Any]]:
    """Return (tokens, shares) for stretches with constant weights; neighbours are merged if there
    are more than MAX_STRETCHES."""
    stretches = phase["stretches"]
    group_size = max(1, -(-len(stretches) // MAX_STRETCHES))
    groups = [
        stretches[first : first + group_size] for first in range(0, len(stretches), group_size)
    ]
    return [
        {
            "tokens": sum(stretch["rows"] for stretch in group) * phase["seq_len"],
            "shares": _shares(group),
        }
        for group in groups
    ]


def _shares(stretches: Sequence[dict[str, Any]]) -> list[float]:
    """Return the stretches' mean shares, weighted by rows."""
    rows = np.array([stretch["rows"] for stretch in stretches], np.float64)
    weights = np.array([stretch["weights"] for stretch in stretches], np.float64)
    shares = rows @ (weights / weights.sum(axis=1, keepdims=True)) / rows.sum()
    return [float(share) for share in shares]


def _mean_shares(phase: dict[str, Any], num_sources: int) -> list[float]:
    return _shares(phase["stretches"]) if phase["stretches"] else [0.0] * num_sources


def _taken(run: BoardRun, phase: dict[str, Any], names: Sequence[str]) -> list[float]:
    """Return the rows taken in a phase by source."""
    metrics = run.metrics
    steps = metrics.axis("step")
    end_step = phase["first_step"] + phase["rows"] // phase["batch_rows"]
    first, end = (int(np.searchsorted(steps, step)) for step in (phase["first_step"], end_step))
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
    """Return the last start's layout, the ranks' coordinates in the grid, and measured memory."""
    starts = [event for event in run.events if event["event"] in STARTS and "layout" in event]
    if not starts:
        return {}
    degrees = dict(starts[-1]["layout"])
    shape = [int(degrees.get(axis, 1)) for axis in AXES]
    num_ranks = int(np.prod(shape))
    coordinates = np.stack(np.unravel_index(np.arange(num_ranks), shape), axis=1).tolist()
    last_start = run.events.index(starts[-1])
    measured = [event for event in run.events[last_start:] if event["event"] in MEMORY]
    memory_by_rank = measured[-1]["memory"] if measured else []
    first_rank_memory = None
    entries = run.metrics.index.entries
    if entries and "memory" in run.metrics.index.series:
        first_rank_memory = float(run.metrics.values("memory", entries - 1, entries)[0])
    memory = memory_by_rank or [first_rank_memory]
    return {
        "degrees": degrees,
        "starts": len(starts),
        "ranks": [
            {
                "rank": rank,
                "place": dict(zip(AXES, coordinate, strict=True)),
                "memory": memory[rank] if rank < len(memory) else None,
            }
            for rank, coordinate in enumerate(coordinates)
        ],
        "measured": measured[-1]["step"] if measured else None,
    }


def checkpoints(run: BoardRun) -> Iterator[dict[str, Any]]:
    """Yield the checkpoints and their state, newest first."""
    folder = storage.join(run.url, files.CHECKPOINTS)
    events = {event["step"]: event for event in run.events if event["event"] == "checkpoint"}
    names = [name for name in storage.names(folder) if store.NAME.match(name)]
    for name in sorted(names, key=store.parse_step, reverse=True):
        step = store.parse_step(name)
        event = events.get(step, {})
        yield {
            "name": name,
            "step": step,
            "time": event.get("time"),
            "blocked": event.get("blocked"),
            **_state(storage.join(folder, name)),
        }


def _state(checkpoint: str) -> dict[str, Any]:
    """Return a checkpoint's scalars and size, or its damage. Hashes are not checked here, but when
    the checkpoint is loaded."""
    remote = storage.exists(storage.join(checkpoint, store.REMOTE))
    try:
        manifest, state = store.read_manifest(checkpoint), store.read_state(checkpoint)
        if not remote and storage.is_local(checkpoint):
            store.check_sizes(checkpoint, manifest.files)
    except UserError as error:
        return {"problem": error.message}
    return {
        "tokens": state.tokens,
        "row": state.row,
        "updates": state.updates,
        "ledger": state.ledger,
        "layout": state.layout,
        "size": sum(file.size for file in manifest.files),
        "remote": remote,
    }


LIST_KEYS = ("memory", "phases", "memory_phases")
"""Event keys whose lists can have an entry per rank."""


def _without_lists(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in LIST_KEYS}
