"""Describe a step's recorded metrics: loss, gradient norm and learning rate."""

from __future__ import annotations

from typing import Any

from ...dataplane.runlog.reader import METRICS, StepLines
from ...dataplane.storage import storage


def describe_recorded_step(run: str, step: int) -> str | None:
    """Describe a step's metrics beside the previous step's; None if none were recorded."""
    file = storage.join(run, METRICS)
    if not storage.exists(file):
        return None
    with StepLines(file) as lines:
        previous, entry = lines.find(step)
    if entry is None or entry["step"] != step:
        return None
    return _describe(entry, previous or {})


def _describe(entry: dict[str, Any], previous: dict[str, Any]) -> str:
    skipped = f"; step skipped: {entry.get('why')}" if entry.get("skipped") else ""
    sources, previous_sources = entry["sources"], previous.get("sources", {})
    width = max(map(len, sources), default=0)
    return "\n".join(
        [
            f"loss {_compared(entry['loss'], previous.get('loss'))}, gradient norm "
            f"{_compared(entry['grad_norm'], previous.get('grad_norm'))}, learning rate "
            f"{entry['lr']:.3g}{skipped}",
            *(
                f"  {name:<{width}}  {metrics['rows']:>3} "
                f"row{'s' if metrics['rows'] != 1 else ' '}  "
                f"loss {_compared(metrics['loss'], previous_sources.get(name, {}).get('loss'))}"
                for name, metrics in sources.items()
            ),
        ]
    )


def _compared(value: float | None, previous: float | None) -> str:
    text = "not finite" if value is None else f"{value:.4g}"
    return text if previous is None else f"{text} (step before: {previous:.4g})"
