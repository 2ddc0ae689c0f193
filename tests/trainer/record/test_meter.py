"""Measured steps and memory of a rank."""

from __future__ import annotations

import torch

from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.batches import RunPlan
from headrace.trainer.loop.synthetic import SyntheticConfig, SyntheticPlan
from headrace.trainer.record.meter import (
    Allocation,
    Meter,
    find_peak,
    gather_measurements,
    live_bytes,
)

MIB = 1 << 20


def test_the_peak_is_the_highest_sum_in_the_order_of_time() -> None:
    events = [(3, 7, 50), (1, 8, 100), (4, 7, -50), (6, 9, 30), (8, 6, 5), (9, 9, -30)]
    alive = {8, 6}
    assert find_peak([Allocation(*event) for event in events], alive) == 150
    assert find_peak([Allocation(1, 1, -10)]) == 0


def test_memory_that_another_thread_gives_back_does_not_count() -> None:
    again = [Allocation(1, 7, 100), Allocation(2, 8, 10), Allocation(3, 7, 100)]
    assert find_peak(again, alive={7, 8}) == 110
    assert find_peak(again, alive={8}) == 10


def test_a_rank_measures_its_second_step_and_later_times(parallel: Parallel) -> None:
    config = SyntheticConfig(steps=4, seq_len=8, batch_rows=2)
    plan: RunPlan = SyntheticPlan(config=config, vocab_size=8, seed=0)
    meter = Meter(torch.device("cpu"))
    kept = torch.ones(4 * MIB, dtype=torch.uint8)
    before = live_bytes()
    for step in range(4):
        meter.begin(step)
        more = torch.ones((3 + step) * MIB, dtype=torch.uint8)  # of the second step: 4 MiB
        del more
    meter.end()
    assert [step for step, *_ in meter.timed_steps()] == [2, 3]
    result = gather_measurements(meter, plan, parallel.control)
    [memory] = result["memory"]
    assert before >= len(kept) and abs(memory - before - 4 * MIB) < MIB / 16
    phase = result["phases"]["synthetic"]
    assert phase["steps"] == 2 and phase["seconds"] > 0
    assert result["memory_phases"] == ["synthetic"] and meter.peak_steps() == [1]
    short_meter = Meter(torch.device("cpu"), profiled=False)
    for step in range(3):
        short_meter.begin(step)
    assert short_meter.peak is None


def test_a_start_of_one_step_reads_no_memory() -> None:
    meter = Meter(torch.device("cpu"))
    meter.begin(4)
    meter.end()
    assert meter.peak is None and meter.peak_steps() == []
