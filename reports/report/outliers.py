"""Find outlier steps, whose loss stands out from the steps before, and what may explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .reading.candidates import WINDOW
from .reading.chunks import read_line, read_lines_before
from .reading.data import RunData


@dataclass(frozen=True)
class OutlierStep:
    """A step whose loss, or a source's loss, stands out from the steps before."""

    entry: dict[str, Any]
    """Its line in metrics.jsonl."""
    usual: float
    """Median loss over the steps before."""
    deviations: float
    risen: list[tuple[str, float, float | None]]
    """Sources that caused it, largest contribution first: name, loss, and usual loss."""
    usual_norm: float | None
    """Median gradient norm over the steps before."""
    events: list[str]
    """Phase starts, resumes and skipped steps shortly before."""

    @property
    def step(self) -> int:
        return int(self.entry["step"])


def find_outliers(run: RunData) -> list[OutlierStep]:
    """Return the largest outliers, ordered by step."""
    file = run.folder.metrics
    return [
        _describe(
            run,
            read_line(file, offset),
            read_lines_before(file, offset, _is_applied, WINDOW),
            deviations,
        )
        for deviations, _, offset in run.candidates.largest()
    ]


def _is_applied(entry: dict[str, Any]) -> bool:
    return entry["loss"] is not None and not entry.get("skipped")


def _describe(
    run: RunData, entry: dict[str, Any], window: Sequence[dict[str, Any]], deviations: float
) -> OutlierStep:
    norms = [earlier["grad_norm"] for earlier in window if earlier["grad_norm"] is not None]
    usual = median(earlier["loss"] for earlier in window)
    return OutlierStep(
        entry=entry,
        usual=usual,
        deviations=deviations,
        risen=_risen_sources(entry, window, usual),
        usual_norm=median(norms) if norms else None,
        events=_events_before(run, int(entry["step"])),
    )


def _risen_sources(
    entry: dict[str, Any], window: Sequence[dict[str, Any]], usual_overall: float
) -> list[tuple[str, float, float | None]]:
    """Return the sources that contribute to the rise at least a fifth as much as the first: name,
    loss, usual loss. A source that is new in the window is compared with the usual loss overall."""
    rises = []
    total_weight = sum(source["weight"] for source in entry["sources"].values())
    for name, source in entry["sources"].items():
        losses = [earlier["sources"].get(name, {}).get("loss") for earlier in window]
        known = [loss for loss in losses if loss is not None]
        if source["loss"] is None:
            continue
        usual = median(known) if known else None
        baseline = usual_overall if usual is None else usual
        rise = (source["loss"] - baseline) * source["weight"] / total_weight
        rises.append((rise, (name, source["loss"], usual)))
    rises.sort(key=lambda item: -item[0])
    return [source for rise, source in rises if rise > 0.2 * rises[0][0]]


def _events_before(run: RunData, step: int) -> list[str]:
    """Return the events in the window before a step, latest first."""
    events = [
        (step - phase.first_step, f"phase {phase.name} began") for phase in run.plan.phases[1:]
    ]
    events += [
        (step - event["step"], "the run was resumed")
        for event in run.events
        if event["event"] == "resume"
    ]
    events += [
        (step - event["step"], f"a step was skipped: {event['event']}") for event in run.skipped
    ]
    return [
        f"{event} here" if ago == 0 else f"{event} {ago} step{'s' * (ago != 1)} before"
        for ago, event in sorted(events)
        if 0 <= ago < WINDOW
    ]
