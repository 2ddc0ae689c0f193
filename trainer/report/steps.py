"""Single steps: those whose loss stands out, and what a chart says of a place in it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...console.progress import human
from ..loop.guard import usual
from .data import RunData, groups

WINDOW = 100
"""Steps that a loss is compared with."""
DEVIATIONS = 6.0
"""From the median of the window: what is above that stands out, if all of the window is lower."""
APART = 10
"""Steps that stand out nearer to each other than that are one event."""
MOST = 10
"""Of a table: who has more of them looks into metrics.jsonl."""


@dataclass(frozen=True)
class Outstanding:
    """A step whose loss, or one source's, stands out from those before it."""

    entry: dict[str, Any]
    usual: float
    """The loss of the steps before."""
    deviations: float
    risen: list[tuple[str, float, float | None]]
    """The sources that made it: loss, and the usual one. Those that did most come first."""
    usual_norm: float | None
    beside: list[str]
    """What happened just before it."""

    @property
    def step(self) -> int:
        return int(self.entry["step"])


def outstanding(run: RunData) -> list[Outstanding]:
    """The steps that stand out most, in order. Those that were left out are told elsewhere."""
    taken = [e for e in run.metrics if e["loss"] is not None and not e.get("skipped")]
    windows: dict[str | None, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
    found: list[tuple[float, int]] = []
    for place, entry in enumerate(taken):
        highest = 0.0
        for name, loss in _losses(entry):
            highest = max(highest, _deviations(windows[name], loss))
            windows[name].append(loss)
        if highest > DEVIATIONS:
            found.append((highest, place))
    kept: list[tuple[float, int]] = []
    for deviations, place in sorted(found, reverse=True):
        if len(kept) < MOST and all(abs(place - other) >= APART for _, other in kept):
            kept.append((deviations, place))
    return [
        _look(run, taken[place], taken[max(0, place - WINDOW) : place], deviations)
        for deviations, place in sorted(kept, key=lambda each: each[1])
    ]


def _losses(entry: dict[str, Any]) -> Iterator[tuple[str | None, float]]:
    """That of all tokens, and those of the sources: one of few rows may be lost in the whole."""
    yield None, entry["loss"]
    for name, each in entry["sources"].items():
        if each["loss"] is not None:
            yield name, each["loss"]


def _deviations(window: Sequence[float], loss: float) -> float:
    """How far a loss is from those before it; 0 if one of them was as high."""
    if len(window) < WINDOW // 4 or loss <= max(window):
        return 0.0
    middle, deviation = usual(window)
    return (loss - middle) / deviation


def _look(
    run: RunData, entry: dict[str, Any], before: Sequence[dict[str, Any]], deviations: float
) -> Outstanding:
    norms = [each["grad_norm"] for each in before if each["grad_norm"] is not None]
    middle = median(each["loss"] for each in before)
    return Outstanding(
        entry=entry,
        usual=middle,
        deviations=deviations,
        risen=_risen(entry, before, middle),
        usual_norm=median(norms) if norms else None,
        beside=_beside(run, int(entry["step"])),
    )


def _risen(
    entry: dict[str, Any], before: Sequence[dict[str, Any]], middle: float
) -> list[tuple[str, float, float | None]]:
    """The sources that add most to the rise: one without a usual loss is compared with all."""
    found = []
    total = sum(each["weight"] for each in entry["sources"].values())
    for name, now in entry["sources"].items():
        losses = [each["sources"].get(name, {}).get("loss") for each in before]
        known = [loss for loss in losses if loss is not None]
        if now["loss"] is None:
            continue
        own = median(known) if known else None
        rise = (now["loss"] - (middle if own is None else own)) * now["weight"] / total
        found.append((rise, (name, now["loss"], own)))
    found.sort(key=lambda each: -each[0])
    return [told for rise, told in found if rise > 0.2 * found[0][0]]


def _beside(run: RunData, step: int) -> list[str]:
    found = [
        (step - phase.first_step, f"phase {phase.name} began") for phase in run.job.plan.phases[1:]
    ]
    found += [
        (step - event["step"], "the run was resumed")
        for event in run.events
        if event["event"] == "resume"
    ]
    found += [(step - event["step"], f"a step was left out: {event['event']}")
              for event in run.left_out]  # fmt: skip
    return [
        f"{what} here" if ago == 0 else f"{what} {ago} step{'s' * (ago != 1)} before"
        for ago, what in sorted(found)
        if 0 <= ago < WINDOW
    ]


def spells(run: RunData) -> Iterator[tuple[float, float, str]]:
    """(from, to, what is to be said) of the columns of a chart over tokens."""
    begin = float(run.first_token)
    for group in groups(run.metrics):
        end = float(group[-1]["tokens"])
        yield begin, end, _told(group)
        begin = end


def _told(group: Sequence[dict[str, Any]]) -> str:
    first, last = group[0], group[-1]
    single = len(group) == 1
    lines = [
        f"step {first['step']:,}" if single else f"steps {first['step']:,} to {last['step']:,}",
        f"{human(last['tokens'])} tokens, phase {last['phase']}",
    ]
    known = [entry for entry in group if entry["loss"] is not None]
    if known:
        highest = max(known, key=lambda entry: float(entry["loss"]))
        mean = sum(entry["loss"] for entry in known) / len(known)
        more = "" if single else f" (highest {highest['loss']:.4f} at step {highest['step']:,})"
        lines.append(f"loss {mean:.4f}{more}")
    names = dict.fromkeys(name for entry in group for name in entry["sources"])
    for name in names:
        given = [entry["sources"].get(name, {}).get("loss") for entry in group]
        losses = [loss for loss in given if loss is not None]
        if len(names) > 1 and losses:
            lines.append(f"  {name} {sum(losses) / len(losses):.4f}")
    norms = [entry["grad_norm"] for entry in group if entry["grad_norm"] is not None]
    if norms:
        lines.append(f"gradient norm {'' if single else 'up to '}{max(norms):.3g}")
    lines.append(f"learning rate {last['lr']:.3g}")
    lines += [f"step {e['step']:,} was left out: {e['why']}" for e in group if e.get("skipped")]
    return "\n".join(lines)
