"""The executor on one stage: the order of the passes, and which of them is the last."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from headrace.trainer.engines.objective import Sums
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.layout.schedules import Orders, forward_only
from headrace.trainer.loop.execute import execute


@dataclass
class Batch:
    """One row of one token, whose loss is the token."""

    number: float

    @property
    def tokens(self) -> torch.Tensor:
        return torch.tensor([[self.number]])

    targets = weights = tokens
    cu_seqlens = torch.tensor([0, 1])


class Engine:
    """Records the backward passes: the loss that each starts from, and which is the last."""

    def __init__(self) -> None:
        self.passes: list[tuple[float, bool]] = []

    def __call__(self, tokens: torch.Tensor, *more: Any) -> Sums:
        return Sums(tokens.sum(), tokens[0])

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.passes.append((float(loss), last))


def run(orders: Orders, parallel: Parallel) -> tuple[list[tuple[float, bool]], list[float]]:
    """Execute on micro-batches 1, 2 and 4, whose backward passes divide by 2."""
    engine = Engine()
    batches: Any = [Batch(1), Batch(2), Batch(4)]
    rows = execute(orders, batches, engine, parallel, 2.0)  # type: ignore[arg-type]
    return engine.passes, [float(row) for row in rows]


def backwards_reversed(orders: Orders) -> Orders:
    """Return a schedule that no table has: the executor follows any list."""
    [order] = orders
    backwards = [action for action in order if action.kind == "backward"]
    return [[*forward_only(orders)[0], *reversed(backwards)]]


@pytest.mark.parametrize(
    ("schedule", "changed", "passes"),
    [
        ("1f1b", list, [(0.5, False), (1.0, False), (2.0, True)]),
        ("gpipe", list, [(0.5, False), (1.0, False), (2.0, True)]),
        ("gpipe", backwards_reversed, [(2.0, False), (1.0, False), (0.5, True)]),
    ],
)
def test_the_last_backward_pass_of_a_schedule_is_marked(
    parallel: Parallel, schedule: Any, changed: Any, passes: Any
) -> None:
    """The losses are in the order of the micro-batches."""
    orders = changed(LayoutConfig(schedule=schedule).orders(3))
    ours = replace(parallel, device=torch.device("cpu"))
    assert run(orders, ours) == (passes, [1, 2, 4])


def test_evaluation_runs_no_backward_pass(parallel: Parallel) -> None:
    assert run(forward_only(LayoutConfig().orders(3)), parallel) == ([], [1, 2, 4])
