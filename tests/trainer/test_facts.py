from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headrace.trainer.facts import exchange
from headrace.trainer.layout import Parallel


@dataclass
class Batch:
    rows: list[int]
    sources: list[int]
    digests: list[bytes]
    tokens: Any = field(default=None)


def digest(row: int) -> bytes:
    return bytes([row]) * 16


def test_rows_are_put_in_their_global_order_and_padding_is_left_out(parallel: Parallel) -> None:
    batches = [
        Batch([7, 5], [1, 0], [digest(7), digest(5)]),
        Batch([6, -1], [1, 0], [digest(6)]),
    ]
    facts = exchange(
        torch.tensor([2.0, 9.0], dtype=torch.float64),
        torch.tensor([4.0, 6.0], dtype=torch.float64),
        batches,  # type: ignore[arg-type]
        data_wait=0.5,
        stop=True,
        save_failed=False,
        parallel=parallel,
    )
    assert facts.digests == [digest(5), digest(6), digest(7)]
    assert facts.rows == [1, 2], "padding is no source's row"
    assert facts.loss == pytest.approx(11 / 10)
    assert (facts.stop, facts.save_failed, facts.data_wait) == (True, False, 0.5)
