from __future__ import annotations

import pytest
import torch

from headrace.trainer.loop.batches import PADDING
from headrace.trainer.loop.synthetic import SyntheticConfig, SyntheticLoader, SyntheticPlan

PLAN = SyntheticPlan(SyntheticConfig(steps=3, seq_len=8, batch_rows=5), 50, 1)


def rows_of(step: int, world: int, micro: int) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    counts = set()
    for rank in range(world):
        loader = SyntheticLoader(PLAN, rank=rank, world=world, micro_batch=micro, start_step=step)
        batches = next(iter(loader))
        counts.add(len(batches))
        for batch in batches:
            for place, row in enumerate(batch.rows):
                assert bool(batch.weights[place].any()) == (row != PADDING)
                if row != PADDING:
                    assert row not in result
                    result[row] = batch.tokens[place].tolist()
    assert len(counts) == 1, "every rank has as many micro-batches"
    return result


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 5), (2, 2), (3, 1), (5, 4)])
def test_a_row_is_a_function_of_its_number(world: int, micro: int) -> None:
    assert rows_of(1, world, micro) == rows_of(1, 1, 2)
    assert sorted(rows_of(1, world, micro)) == [5, 6, 7, 8, 9]


def test_targets_follow_tokens() -> None:
    (batch,) = next(iter(SyntheticLoader(PLAN, rank=0, world=1, micro_batch=5, start_step=0)))
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.cu_seqlens.tolist() == [0, 8, 16, 24, 32, 40]


def test_another_configuration_is_another_plan() -> None:
    longer = SyntheticPlan(SyntheticConfig(steps=3, seq_len=16, batch_rows=5), 50, 1)
    assert longer.hash != PLAN.hash and PLAN.end_step == 3 and PLAN.tokens == 120
