"""Schedules: the order of the passes; test_loop.py trains with another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace.trainer.engines.objective import Sums
from headrace.trainer.loop.schedule import Action, execute, forward_only, sequential


def all_forward_first(micro_batches: int) -> list[Action]:
    """GPipe's order on one stage, backward passes from the last micro-batch to the first."""
    numbers = range(micro_batches)
    forwards = [Action("forward", number) for number in numbers]
    return forwards + [Action("backward", number) for number in reversed(numbers)]


class Engine:
    """Records the backward passes: the loss that each starts from, and which is the last."""

    def __init__(self) -> None:
        self.passes: list[tuple[float, bool]] = []

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.passes.append((float(loss), last))


def run(actions: Sequence[Action]) -> tuple[list[tuple[float, bool]], list[list[float]]]:
    """Execute on micro-batches 1, 2 and 4; the last backward pass divides by 8, the others by 2."""
    engine, seen = Engine(), []

    def forward(batch: Any) -> Sums:
        return Sums(torch.tensor(float(batch)), torch.tensor([float(batch)]))

    def before_last(rows: list[torch.Tensor]) -> float:
        seen.append([float(row) for row in rows])
        return 8.0

    batches: Any = [1, 2, 4]
    rows = execute(actions, batches, forward, engine, 2.0, before_last)  # type: ignore[arg-type]
    seen.append([float(row) for row in rows])
    return engine.passes, seen


def test_sequential_runs_each_micro_batch_forward_then_backward() -> None:
    kinds = [(action.kind[0], action.micro) for action in sequential(2)]
    assert kinds == [("f", 0), ("b", 0), ("f", 1), ("b", 1)]
    assert [action.micro for action in forward_only(sequential(3))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("schedule", "passes"),
    [
        (sequential, [(0.5, False), (1.0, False), (0.5, True)]),
        (all_forward_first, [(2.0, False), (1.0, False), (0.125, True)]),
    ],
)
def test_the_last_backward_pass_of_a_schedule_is_marked(schedule: Any, passes: Any) -> None:
    """All losses are known before it, in the order of the micro-batches."""
    assert run(schedule(3)) == (passes, [[1, 2, 4], [1, 2, 4]])


def test_evaluation_runs_no_backward_pass() -> None:
    assert run(forward_only(all_forward_first(3))) == ([], [[1, 2, 4]])
