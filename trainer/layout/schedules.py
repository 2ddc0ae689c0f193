"""Pipeline schedules: the order of forward and backward passes within one step, for each stage.

    2 stages, 3 micro-batches      1f1b                         gpipe
    stage 0                        F0 F1 B0 F2 B1 B2            F0 F1 F2 B0 B1 B2
    stage 1                        F0 B0 F1 B1 F2 B2            F0 F1 F2 B0 B1 B2

A schedule is data, lists of actions that a pure function makes. The executor runs the list of its
stage; the simulator, the dry run and the report read the same lists. Evaluation runs the forward
passes alone. On one stage, 1f1b runs each micro-batch forward, then backward.

Chunk c is on stage c mod stages. All schedules run the backward passes of a chunk in the order of
the micro-batches, so that gradients are added in the order that one stage has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one chunk."""

    kind: Kind
    chunk: int
    micro: int
    """Index of the micro-batch within the step."""


Orders = Sequence[Sequence[Action]]
"""Actions of each stage, in order."""
Schedule = Callable[[int, int, int], Orders]
"""Maps (stages, chunks of a stage, micro-batches) to the actions of each stage."""


def one_forward_one_backward(stages: int, chunks: int, micro_batches: int) -> Orders:
    """1F1B: a stage runs ahead by the number of stages behind it, and then takes turns."""
    return [
        _alternate(
            [Action("forward", stage, micro) for micro in range(micro_batches)],
            [Action("backward", stage, micro) for micro in range(micro_batches)],
            ahead=stages - stage - 1,
        )
        for stage in range(stages)
    ]


def gpipe(stages: int, chunks: int, micro_batches: int) -> Orders:
    """All forward passes, then all backward passes."""
    kinds: tuple[Kind, ...] = ("forward", "backward")
    return [
        [Action(kind, stage, micro) for kind in kinds for micro in range(micro_batches)]
        for stage in range(stages)
    ]


def interleaved(stages: int, chunks: int, micro_batches: int) -> Orders:
    """1F1B in rounds: as many micro-batches as there are stages pass a chunk, then the next chunk
    (Narayanan et al., 2021). Micro-batches that an incomplete last round lacks are left out."""
    rounds = -(-micro_batches // stages)
    passes = [
        (chunk, round_ * stages + micro)
        for round_ in range(rounds)
        for chunk in range(chunks)
        for micro in range(stages)
    ]
    orders = []
    for stage in range(stages):
        forward = [Action("forward", chunk * stages + stage, micro) for chunk, micro in passes]
        backward = [
            Action("backward", (chunks - 1 - chunk) * stages + stage, micro)
            for chunk, micro in passes
        ]
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
        order = _alternate(forward, backward, ahead)
        orders.append([action for action in order if action.micro < micro_batches])
    return orders


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
}


ZERO_BUBBLE = re.compile(r"zb|zero.?bubble|dual.?pipe", re.IGNORECASE)
"""Names of zero-bubble schedules in other programs: zb-h1, ZBV, DualPipe, …"""


def refused(name: str) -> str | None:
    """Return why a schedule of other programs is not in the table; None for other names."""
    if not ZERO_BUBBLE.search(name):
        return None
    return (
        f"`{name}` is a zero-bubble schedule: it computes the gradients of weights apart from "
        "those of activations, which is wrong under FSDP2 and under ZeRO-1 in bf16, and fails "
        "under ZeRO-2; use schedule=interleaved with chunks=2 or more, whose bubble is smaller "
        "than that of 1f1b"
    )


def forward_only(orders: Orders) -> Orders:
    """Return the forward passes of a schedule, for evaluation."""
    return [[action for action in order if action.kind == "forward"] for order in orders]


def _alternate(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """Take `ahead` forward passes, then one forward and one backward pass in turn."""
    order, rest = forward[:ahead], forward[ahead:]
    for number, action in enumerate(backward):
        order += rest[number : number + 1]
        order.append(action)
    return order
