"""Micro-batch schedules: the order of forward and backward passes within one step.

    sequential, 3 micro-batches      F0 B0 F1 B1 F2 B2

A schedule is data, a list of actions that a pure function makes. One executor runs the list; a
simulator, a dry run or a drawing can read the same list. Evaluation runs its forward passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ...models.documents import Documents
from ...models.parallel.axes import ALONE, Axis
from ..engines.engine import Engine
from ..engines.objective import Sums
from .batches import MicroBatch


def forward_pass(
    objective: Callable[..., Sums], batch: MicroBatch, device: torch.device, context: Axis = ALONE
) -> Sums:
    """Run the objective on this rank's part of a micro-batch."""
    tokens, targets, weights = (
        tensor.to(device, non_blocking=True)
        for tensor in (batch.tokens, batch.targets, batch.weights)
    )
    whole = (tokens.shape[0], tokens.shape[1] * context.size)
    documents = Documents.from_cu_seqlens(batch.cu_seqlens, whole).part(context)
    return objective(tokens, targets, weights, documents.to(device))


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro: int
    """Index of the micro-batch within the step."""


class Schedule(Protocol):
    def __call__(self, micro_batches: int) -> Sequence[Action]:
        """Return the actions of this rank in a step of so many micro-batches."""


def sequential(micro_batches: int) -> list[Action]:
    """Each micro-batch is run forward, then backward; one graph is alive at a time."""
    return [Action(kind, micro) for micro in range(micro_batches) for kind in _KINDS]


_KINDS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def forward_only(actions: Sequence[Action]) -> list[Action]:
    """Return the forward passes of a schedule, for evaluation."""
    return [action for action in actions if action.kind == "forward"]


def execute(
    actions: Sequence[Action],
    batches: Sequence[MicroBatch],
    forward: Callable[[MicroBatch], Sums],
    engine: Engine,
    divisor: float,
    before_last: Callable[[list[torch.Tensor]], float] | None = None,
) -> list[torch.Tensor]:
    """Run the actions. Return each micro-batch's losses by row, Σ w·ℓ, in the order of `batches`.

    Backward passes start from the loss divided by `divisor`. Before the last backward pass,
    `before_last` receives the losses by row and returns the divisor of that pass.
    """
    backwards = [place for place, action in enumerate(actions) if action.kind == "backward"]
    totals: dict[int, torch.Tensor] = {}
    rows: dict[int, torch.Tensor] = {}
    for place, action in enumerate(actions):
        if action.kind == "forward":
            totals[action.micro], rows[action.micro] = forward(batches[action.micro])
            continue
        last = place == backwards[-1]
        if last and before_last is not None:
            divisor = before_last(_ordered(rows))
        engine.backward(totals.pop(action.micro) / divisor, last=last)
    return _ordered(rows)


def _ordered(rows: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    return [rows[micro] for micro in sorted(rows)]
