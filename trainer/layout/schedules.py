"""Pipeline schedules: the order of forward and backward passes within a step, for each stage.

    2 stages, 3 micro-batches      1f1b                         gpipe
    stage 0                        F0 F1 B0 F2 B1 B2            F0 F1 F2 B0 B1 B2
    stage 1                        F0 B0 F1 B1 F2 B2            F0 F1 F2 B0 B1 B2

A schedule is data: a list of actions for each stage. The executor runs its stage's list; the
simulator, the dry run, the planner and the report read the same lists. Evaluation runs the forward
passes alone. On one stage, 1f1b runs each micro-batch forward, then backward. Every other property
follows from the lists; closed forms compute some faster.

Chunk c is on stage c mod stages. All schedules run a chunk's backward passes in the order of the
micro-batches, so gradients are added in the same order as on one stage.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Seconds = npt.NDArray[np.float64]

MAX_CHUNKS = 8
"""Chunks per stage, of those that the planner tries, beyond which the bubble hardly shrinks."""
Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class StageAction:
    """A pass of one micro-batch through one chunk."""

    kind: Kind
    chunk: int
    micro: int
    """Index of the micro-batch within the step."""


Orders = Sequence[Sequence[StageAction]]
"""Actions of each stage, in order."""


class FullestMoment(NamedTuple):
    """The moment when a stage has the most micro-batches in flight."""

    in_flight: tuple[int, ...]
    """Micro-batches in flight, by chunk."""
    next: int
    """Index, within the stage, of the chunk that runs the next backward pass."""


class Schedule(ABC):
    """A kind of schedule, for any number of stages, chunks per stage and micro-batches per step.

    A micro-batch is in flight in a chunk from the forward to the backward pass: its activations
    are in memory.
    """

    name: ClassVar[str]
    """Value for `layout.schedule`."""
    has_chunks: ClassVar[bool] = False
    """True if stages have several chunks."""

    @abstractmethod
    def orders(self, stages: int, chunks: int, micro_batches: int) -> Orders:
        """Return the actions, by stage."""

    def chunk_counts(self, stages: int, layers: int) -> Sequence[int]:
        """Return the chunks per stage that the planner tries for a model of `layers` layers."""
        return (1,)

    def sample_size(self, stages: int, micro_batches: int) -> int:
        """Return a number of micro-batches whose step reaches the same peak memory."""
        return micro_batches

    def warm_up(self, stages: int, chunks: int, micro_batches: int) -> int:
        """Upper bound on the micro-batches that a stage starts before its first backward pass
        ends."""
        return max(
            len({action.micro for action in order[: _first_backward(order)]})
            for order in self._sample(stages, chunks, micro_batches)
        )

    def fullest_moment(
        self, stage: int, stages: int, chunks: int, micro_batches: int
    ) -> FullestMoment:
        """Return the first moment before a backward pass with the most micro-batches in flight."""
        order = self._sample(stages, chunks, micro_batches)[stage]
        moments = (
            FullestMoment(count, action.chunk // stages)
            for action, count in _count_in_flight(order, stages, chunks)
            if action.kind == "backward"
        )
        return max(moments, key=lambda moment: sum(moment.in_flight))

    def bound(
        self, micro_batches: int, depth: int, passes: Seconds, backward: Seconds, trip: Seconds
    ) -> Seconds:
        """Lower bound on the seconds from the first to the last pass of a stage with one chunk.

        `depth` counts the stages from this stage to the last. `passes` is the time of the stage's
        forward and backward pass, `backward` that of the latter, and `trip` that of a micro-batch's
        passes from this stage to the last and back.
        """
        import numpy as np

        return np.maximum(micro_batches * passes, trip)

    def _sample(self, stages: int, chunks: int, micro_batches: int) -> Orders:
        return _sampled(self, stages, chunks, self.sample_size(stages, micro_batches))


@lru_cache(maxsize=64)
def _sampled(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> Orders:
    return schedule.orders(stages, chunks, micro_batches)


def _first_backward(order: Sequence[StageAction]) -> int:
    return next(index for index, action in enumerate(order) if action.kind == "backward")


def _count_in_flight(
    order: Sequence[StageAction], stages: int, chunks: int
) -> Iterator[tuple[StageAction, tuple[int, ...]]]:
    """Yield each action with the micro-batches in flight before it, by chunk."""
    counts = [0] * chunks
    for action in order:
        yield action, tuple(counts)
        counts[action.chunk // stages] += 1 if action.kind == "forward" else -1


class OneForwardOneBackward(Schedule):
    """1F1B: a stage runs ahead by the number of later stages, then alternates passes."""

    name = "1f1b"

    def orders(self, stages: int, chunks: int, micro_batches: int) -> Orders:
        return [
            _alternate(
                [StageAction("forward", stage, micro) for micro in range(micro_batches)],
                [StageAction("backward", stage, micro) for micro in range(micro_batches)],
                ahead=stages - stage - 1,
            )
            for stage in range(stages)
        ]

    def sample_size(self, stages: int, micro_batches: int) -> int:
        return min(micro_batches, stages + 2)

    def warm_up(self, stages: int, chunks: int, micro_batches: int) -> int:
        return stages

    def fullest_moment(
        self, stage: int, stages: int, chunks: int, micro_batches: int
    ) -> FullestMoment:
        return FullestMoment((min(micro_batches, stages - stage),), 0)

    def bound(
        self, micro_batches: int, depth: int, passes: Seconds, backward: Seconds, trip: Seconds
    ) -> Seconds:
        """With m ≥ d micro-batches, backward pass n = m - d ends after at least
        trip·(1 + n div d) + (n mod d)·passes, because d micro-batches must return before the next
        starts; d - 1 backward passes follow."""
        import numpy as np

        if micro_batches < depth:
            return super().bound(micro_batches, depth, passes, backward, trip)
        rounds, turns = divmod(micro_batches - depth, depth)
        chained = trip * (1 + rounds) + turns * passes + (depth - 1) * backward
        return np.maximum(micro_batches * passes, chained)


class GPipe(Schedule):
    """All forward passes, then all backward passes."""

    name = "gpipe"

    def orders(self, stages: int, chunks: int, micro_batches: int) -> Orders:
        kinds: tuple[Kind, ...] = ("forward", "backward")
        return [
            [StageAction(kind, stage, micro) for kind in kinds for micro in range(micro_batches)]
            for stage in range(stages)
        ]

    def warm_up(self, stages: int, chunks: int, micro_batches: int) -> int:
        return micro_batches

    def fullest_moment(
        self, stage: int, stages: int, chunks: int, micro_batches: int
    ) -> FullestMoment:
        return FullestMoment((micro_batches,), 0)

    def bound(
        self, micro_batches: int, depth: int, passes: Seconds, backward: Seconds, trip: Seconds
    ) -> Seconds:
        """All forward passes, a round trip, all backward passes."""
        return (micro_batches - 1) * passes + trip


class Interleaved(Schedule):
    """1F1B in rounds: one micro-batch per stage passes a chunk, then the next chunk (Narayanan et
    al., 2021). If the last round is incomplete, its missing micro-batches are skipped."""

    name = "interleaved"
    has_chunks = True

    def chunk_counts(self, stages: int, layers: int) -> Sequence[int]:
        """Two and four, and numbers up to MAX_CHUNKS that give all chunks equally many layers."""
        counts = range(2, min(MAX_CHUNKS, layers // stages) + 1)
        return [n for n in counts if n in (2, 4) or layers % (stages * n) == 0]

    def orders(self, stages: int, chunks: int, micro_batches: int) -> Orders:
        rounds = -(-micro_batches // stages)
        passes = [
            (chunk, round_ * stages + micro)
            for round_ in range(rounds)
            for chunk in range(chunks)
            for micro in range(stages)
        ]
        orders = []
        for stage in range(stages):
            forward = [
                StageAction("forward", chunk * stages + stage, micro) for chunk, micro in passes
            ]
            backward = [
                StageAction("backward", (chunks - 1 - chunk) * stages + stage, micro)
                for chunk, micro in passes
            ]
            ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
            order = _alternate(forward, backward, ahead)
            orders.append([action for action in order if action.micro < micro_batches])
        return orders

    def sample_size(self, stages: int, micro_batches: int) -> int:
        """A chunk has at most 4 micro-batches in flight per stage; an incomplete last round keeps
        its length."""
        return min(micro_batches, 4 * stages + micro_batches % stages)

    def warm_up(self, stages: int, chunks: int, micro_batches: int) -> int:
        return 2 * stages


PLAIN = OneForwardOneBackward()
"""The default schedule."""
SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule for schedule in (PLAIN, GPipe(), Interleaved())
}
"""Schedules by name, the simplest first: it wins where two are equally fast."""


ZERO_BUBBLE = re.compile(r"zb|zero.?bubble|dual.?pipe", re.IGNORECASE)
"""Zero-bubble schedules in other programs: zb-h1, ZBV, DualPipe, …"""


def refusal_reason(name: str) -> str | None:
    """Explain why another program's schedule is missing; None for unknown names."""
    if not ZERO_BUBBLE.search(name):
        return None
    return (
        f"`{name}` is a zero-bubble schedule: it computes the gradients of weights apart from "
        "those of activations, which is wrong under FSDP2 and under ZeRO-1 in bf16, and fails "
        "under ZeRO-2; use schedule=interleaved with chunks=2 or more, whose bubble is smaller "
        "than that of 1f1b"
    )


def forward_only(orders: Orders) -> Orders:
    """Return the forward passes alone, for evaluation."""
    return [[action for action in order if action.kind == "forward"] for order in orders]


def _alternate(
    forward: list[StageAction], backward: list[StageAction], ahead: int
) -> list[StageAction]:
    """Take `ahead` forward passes, then a forward and a backward pass in turn."""
    order, remaining = forward[:ahead], forward[ahead:]
    for number, action in enumerate(backward):
        order += remaining[number : number + 1]
        order.append(action)
    return order
