"""Tooltips of a chart: the steps below the pointer, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...console.progress import human
from .data import RunData, groups


def tooltips(run: RunData) -> Iterator[tuple[float, float, str]]:
    """Yield (from, to, text) for each column of a chart over tokens."""
    begin = float(run.first_token)
    for group in groups(run.metrics):
        end = float(group[-1]["tokens"])
        yield begin, end, _text(group)
        begin = end


def _text(group: Sequence[dict[str, Any]]) -> str:
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
        recorded = [entry["sources"].get(name, {}).get("loss") for entry in group]
        losses = [loss for loss in recorded if loss is not None]
        if len(names) > 1 and losses:
            lines.append(f"  {name} {sum(losses) / len(losses):.4f}")
    norms = [entry["grad_norm"] for entry in group if entry["grad_norm"] is not None]
    if norms:
        lines.append(f"gradient norm {'' if single else 'up to '}{max(norms):.3g}")
    lines.append(f"learning rate {last['lr']:.3g}")
    lines += [f"step {e['step']:,} was skipped: {e['why']}" for e in group if e.get("skipped")]
    return "\n".join(lines)
