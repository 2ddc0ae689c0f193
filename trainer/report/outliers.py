"""Outlier steps: steps whose loss stands out from the steps before them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..loop.guard import usual
from .data import RunData

WINDOW = 100
"""Steps that a loss is compared with."""
DEVIATIONS = 6.0
"""An outlier is above the window's maximum, and above its median by more than this many
deviations."""
APART = 10
"""Outliers nearer to each other than this many steps are one event."""
MOST = 10
"""Rows of the table; metrics.jsonl has all steps."""


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
    """Return the steps that stand out most, in order. Skipped steps have a table of their own."""
    applied = [e for e in run.metrics if e["loss"] is not None and not e.get("skipped")]
    windows: dict[str | None, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
    candidates: list[tuple[float, int]] = []
    for place, entry in enumerate(applied):
        highest = 0.0
        for name, loss in _losses(entry):
            highest = max(highest, _deviations(windows[name], loss))
            windows[name].append(loss)
        if highest > DEVIATIONS:
            candidates.append((highest, place))
    kept: list[tuple[float, int]] = []
    for deviations, place in sorted(candidates, reverse=True):
        if len(kept) < MOST and all(abs(place - other) >= APART for _, other in kept):
            kept.append((deviations, place))
    return [
        _describe(run, applied[place], applied[max(0, place - WINDOW) : place], deviations)
        for deviations, place in sorted(kept, key=lambda outlier: outlier[1])
    ]


def _losses(entry: dict[str, Any]) -> Iterator[tuple[str | None, float]]:
    """Yield the loss of all tokens, and of each source: the mean hides a source of few rows."""
    yield None, entry["loss"]
    for name, source in entry["sources"].items():
        if source["loss"] is not None:
            yield name, source["loss"]


def _deviations(window: Sequence[float], loss: float) -> float:
    """Return how many deviations a loss is above the window's median; 0 if the window has a loss
    as high."""
    if len(window) < WINDOW // 4 or loss <= max(window):
        return 0.0
    middle, deviation = usual(window)
    return (loss - middle) / deviation


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
        (step - phase.first_step, f"phase {phase.name} began") for phase in run.job.plan.phases[1:]
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
