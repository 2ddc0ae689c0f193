"""What is unknown before a run whose controllers decide shares: bounds, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...dataplane.order.plan import Plan
from ..planning.controlled import share_bounds

Epochs = Mapping[str, tuple[float, float]]
"""Epochs that a source has given at the end of a phase, and those in the phase."""


@dataclass(frozen=True, kw_only=True)
class ShareBounds:
    """Bounds of a source in a controlled phase; they hold for every decision."""

    source: str
    min_share: float
    max_share: float
    max_total_epochs: float
    """Epochs at the phase's end if it gets the largest share in all phases with a controller."""


@dataclass(frozen=True, kw_only=True)
class ControlledPhase:
    """A phase whose shares a controller decides during the run."""

    phase: str
    controller: str
    sources: tuple[ShareBounds, ...]


def find_bounds(plan: Plan, planned: Sequence[Epochs]) -> Iterator[ControlledPhase]:
    """Yield the phases with a controller; `planned` has the epochs of each phase by its plan."""
    limits = {source.name: float(source.max_epochs) for source in plan.sources}
    sizes = {source.name: source.order.tokens for source in plan.sources}
    epochs = {name: total - tail for name, (total, tail) in planned[0].items()}
    for phase, phase_epochs in zip(plan.phases, planned, strict=True):
        bounds = share_bounds(plan, phase)
        for name, (_, taken) in phase_epochs.items():
            _, largest = bounds.get(name, (0.0, 0.0))
            epochs[name] += max(taken, largest * phase.tokens / sizes[name])
        if bounds:
            yield ControlledPhase(
                phase=phase.name,
                controller=phase.control["kind"],
                sources=tuple(
                    ShareBounds(
                        source=name,
                        min_share=smallest,
                        max_share=largest,
                        max_total_epochs=min(epochs[name], limits[name]),
                    )
                    for name, (smallest, largest) in bounds.items()
                ),
            )


def format_bounds(controlled: ControlledPhase) -> Iterator[str]:
    if all(bounds.min_share == bounds.max_share for bounds in controlled.sources):
        yield (
            f"  The controller {controlled.controller} keeps the shares: no decision within the "
            "phase's steps changes them."
        )
        return
    yield (
        f"  The controller {controlled.controller} decides the shares during the run: the table "
        "shows those of the beginning, kept to the end."
    )
    parts = (
        f"{bounds.source} {bounds.min_share:.2%} to {bounds.max_share:.2%} (at most "
        f"{bounds.max_total_epochs:.3g} total epochs)"
        for bounds in controlled.sources
    )
    yield f"  Each decision gives {', '.join(parts)}, and keeps max_epochs."
