"""What a run has recorded of a step: what its rows came to."""

from __future__ import annotations

from typing import Any

from ...dataplane.runlog.reader import METRICS, StepLines
from ...dataplane.storage import storage


def describe_recorded_step(run: str, step: int) -> str | None:
    """A step's losses beside those of the step before, for a person; None if there are none."""
    file = storage.join(run, METRICS)
    if not storage.exists(file):
        return None
    with StepLines(file) as lines:
        before, found = lines.find(step)
    return None if found is None else _told(found, before or {})


def _told(entry: dict[str, Any], before: dict[str, Any]) -> str:
    left_out = f"; left out: {entry.get('why')}" if entry.get("skipped") else ""
    sources, earlier = entry["sources"], before.get("sources", {})
    width = max(map(len, sources), default=0)
    return "\n".join(
        [
            f"loss {_beside(entry['loss'], before.get('loss'))}, gradient norm "
            f"{_beside(entry['grad_norm'], before.get('grad_norm'))}, learning rate "
            f"{entry['lr']:.3g}{left_out}",
            *(
                f"  {name:<{width}}  {each['rows']:>3} row{'s' if each['rows'] != 1 else ' '}  "
                f"loss {_beside(each['loss'], earlier.get(name, {}).get('loss'))}"
                for name, each in sources.items()
            ),
        ]
    )


def _beside(value: float | None, before: float | None) -> str:
    told = "not finite" if value is None else f"{value:.4g}"
    return told if before is None else f"{told} (the step before: {before:.4g})"
