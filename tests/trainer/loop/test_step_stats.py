from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.step_stats import gather


@dataclass
class Batch:
    rows: list[int]
    sources: list[int]
    weights: torch.Tensor
    digests: list[bytes]


def digest(row: int) -> bytes:
    return bytes([row]) * 16


def test_digests_are_in_global_order_without_padding(parallel: Parallel) -> None:
    batches: Any = [
        Batch([7, 5], [1, 0], torch.tensor([[2.0, 0.0], [1.0, 3.0]]), [digest(7), digest(5)]),
        Batch([6, -1], [1, 0], torch.tensor([[4.0, 0.0], [0.0, 0.0]]), [digest(6)]),
    ]
    losses = [torch.tensor([5.0, 2.0]), torch.tensor([4.0, 0.0])]
    stats = gather(batches, losses, 2, parallel, data_wait=0.5, stop=True)
    assert stats.digests == [digest(5), digest(6), digest(7)]
    assert stats.rows == [1, 2], "padding is no source's row"
    assert (stats.losses, stats.weights) == ([2, 9], [4, 6])
    assert stats.loss == pytest.approx(11 / 10)
    assert (stats.stop, stats.save_failed, stats.data_wait) == (True, False, 0.5)
