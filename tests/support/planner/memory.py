"""Oracles of memory: counts of a schedule's lists, sums of a division's stages."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planner.division.interleaved import Stages
from headrace.planner.division.problem import Problem
from headrace.trainer.layout.cuts import Cuts
from headrace.trainer.layout.schedules import StageAction


def max_in_flight(order: Sequence[StageAction], sizes: Sequence[float] | None = None) -> float:
    """Count the micro-batches in flight at the fullest moment, or sum their `sizes` by chunk."""
    in_flight = fullest = 0.0
    for action in order:
        size = 1.0 if sizes is None else sizes[action.chunk]
        in_flight += size if action.kind == "forward" else -size
        fullest = max(fullest, in_flight)
    return fullest


def find_fullest_stage(problem: Problem, cuts: Cuts) -> tuple[int, dict[str, float]]:
    """Find the stage of a division that needs most memory, and its minimal bytes by part."""
    stages, ranges = Stages(problem), problem.ranges(cuts)
    counts = [
        tuple(stages.counts(*ranges[chunk]) for chunk in problem.stage_chunks(stage))
        for stage in range(problem.stages)
    ]
    fullest = max(range(problem.stages), key=lambda stage: stages.bytes(stage, counts[stage]))
    return fullest, stages.bytes_by_part(fullest, counts[fullest])
