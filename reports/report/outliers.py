"""Outlier steps: steps whose loss stands out from the steps before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .reading.candidates import WINDOW
from .reading.chunks import line_at, lines_before
from .reading.data import RunData


@dataclass(frozen=True)
class OutlierStep:
    """A step whose loss, or the loss of one source, stands out from the steps before it."""

    entry: dict[str, Any]
    usual: float
    """Median loss of the steps before."""
    deviations: float
    risen: list[tuple[str, float, float | None]]
    """Sources that caused it, largest contribution first: loss, and usual loss."""
    usual_norm: float | None
    events: list[str]
    """Phase starts, resumes and skipped steps shortly before it."""

    @property
    def step(self) -> int:
        return int(self.entry["step"])


def find_outliers(run: RunData) -> list[OutlierStep]:
    """Return the steps that stand out most, in order."""
    file = run.folder.metrics
    return [
        _describe(
            run, line_at(file, place), lines_before(file, place, _applied, WINDOW), deviations
        )
        for deviations, _, place in run.candidates.largest()
    ]


def _applied(entry: dict[str, Any]) -> bool:
    return entry["loss"] is not None and not entry.get("skipped")


def _describe(
    run: RunData, entry: dict[str, Any], before: Sequence[dict[str, Any]], deviations: float
) -> OutlierStep:
    norms = [earlier["grad_norm"] for earlier in before if earlier["grad_norm"] is not None]
    middle = median(earlier["loss"] for earlier in before)
    return OutlierStep(
        entry=entry,
        usual=middle,
        deviations=deviations,
        risen=_risen(entry, before, middle),
        usual_norm=median(norms) if norms else None,
        events=_events_before(run, int(entry["step"])),
    )


def _risen(
    entry: dict[str, Any], before: Sequence[dict[str, Any]], middle: float
) -> list[tuple[str, float, float | None]]:
    """Return the sources that add most to the rise. A source without a usual loss is compared with
    the usual loss of all tokens."""
    rises = []
    total = sum(source["weight"] for source in entry["sources"].values())
    for name, now in entry["sources"].items():
        losses = [earlier["sources"].get(name, {}).get("loss") for earlier in before]
        known = [loss for loss in losses if loss is not None]
        if now["loss"] is None:
            continue
        own = median(known) if known else None
        rise = (now["loss"] - (middle if own is None else own)) * now["weight"] / total
        rises.append((rise, (name, now["loss"], own)))
    rises.sort(key=lambda risen: -risen[0])
    return [source for rise, source in rises if rise > 0.2 * rises[0][0]]


def _events_before(run: RunData, step: int) -> list[str]:
    """Return the events of the window before a step, the latest first."""
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
        f"{what} here" if ago == 0 else f"{what} {ago} step{'s' * (ago != 1)} before"
        for ago, what in sorted(events)
        if 0 <= ago < WINDOW
    ]
