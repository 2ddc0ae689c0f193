"""Products of experts: a rank's share of experts and tokens, the busiest rank, weights' bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.console.errors import ConfigProblems
from headrace.planner.grid.split import Split
from headrace.planner.hardware import Hardware
from headrace.planner.hardware.file import Experts, MatmulRate
from headrace.planner.prices.experts import price_share
from headrace.planner.prices.machine import IMBALANCE, Machine
from headrace.planner.traces.work import EXPERTS, Work

WORK = Work("matmul", EXPERTS, (8, 4096, 4096, 14336), 1, 0, "matmul")
FLOPS = 2.0 * 8 * 4096 * 4096 * 14336


def machine(imbalance: float | None = None, matmul: tuple[MatmulRate, ...] = ()) -> Machine:
    file = replace(Hardware.load("h100").file, attained=None)
    source = next(iter(file.sources))
    if imbalance is not None:
        file = replace(file, experts=Experts(imbalance=imbalance, source=source))
    return Machine(Hardware(replace(file, matmul=matmul or file.matmul), "h100"), "bf16")


def test_ranks_share_the_operations_and_wait_for_the_busiest() -> None:
    even, default = machine(1.0), machine()
    for split, ep in ((Split(), 1), (Split(4), 8), (Split(4, 2, 2), 4), (Split(1, 1, 8), 8)):
        seconds = price_share(even, WORK, "forward", split, ep)
        assert seconds * even.hardware.rate("matmul", m=1, k=1, n=1, precision="bf16") == (
            pytest.approx(FLOPS * split.rows / split.ranks)
        )
        busiest = price_share(default, WORK, "forward", split, ep)
        assert busiest / seconds == pytest.approx(IMBALANCE if ep > 1 else 1.0)


def test_the_rate_is_that_of_a_rank_s_experts_and_tokens() -> None:
    """On 8 ranks a rank has one expert, with the tokens of all."""
    row, *_ = Hardware.load("h100").file.matmul
    rows = [replace(row, groups=groups, m=m, rate=rate)
            for groups, m, rate in ((1, 32768, 8e14), (8, 4096, 4e14))]  # fmt: skip
    measured = machine(1.0, tuple(rows))
    assert price_share(measured, WORK, "forward", Split(), 1) == pytest.approx(FLOPS / 4e14)
    assert price_share(measured, WORK, "forward", Split(), 8) == pytest.approx(FLOPS / 8e14)


def test_few_tokens_take_as_long_as_the_weights() -> None:
    few = replace(WORK, shape=(128, 4, 4096, 3072))
    weights = 2 * 128 * 4096 * 3072
    even = machine(1.0)
    assert price_share(even, few, "forward", Split(), 1) > even.traffic(weights)
    # Split over 8 ranks, an expert has 32 tokens, and a rank 16 experts.
    assert price_share(even, few, "forward", Split(), 8) < even.traffic(weights) / 7


def test_the_busiest_rank_has_no_less_than_the_mean() -> None:
    with pytest.raises(ConfigProblems) as caught:
        Experts(imbalance=0.9, source="x")
    assert "must be at least 1" in str(caught.value.problems)
