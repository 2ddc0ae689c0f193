"""A rank's own time in a step: without its waits for the other ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from headrace.models.parallel import collectives
from headrace.trainer.loop.compute_time import ComputeTimer, HostClock, StreamClock

TWO = ["fsdp2-0-fp32", "deepspeed-1-fp32", "fsdp2-0-fp32-tp2", "deepspeed-3-fp32"]
FOUR = ["fsdp2-0-fp32-pp2", "fsdp2-0-fp32-cp2", "deepspeed-2-fp32-tp2", "fsdp2-2-fp32"]


class Clock(HostClock):
    """A clock that a test sets."""

    now = 0.0

    def mark(self) -> float:
        return self.now


def test_waits_are_left_out_once() -> None:
    clock = Clock()
    with ComputeTimer(clock) as timer:
        clock.now = 1.0
        with timer.exclude_wait():
            clock.now = 3.0
            with timer.exclude_wait():  # a wait inside of a wait
                clock.now = 7.0
        clock.now = 8.0
        lap = timer.lap()
        clock.now = 10.0
        timer.restart()  # after an evaluation
        clock.now = 10.5
        assert timer.lap().seconds() == 0.5
    assert lap.seconds() == 2.0, "one before and one after the waits from 1 to 7"


def test_waits_of_other_threads_are_none() -> None:
    clock = Clock()
    with ComputeTimer(clock) as timer:
        clock.thread += 1
        with timer.exclude_wait():
            clock.now = 2.0
        assert timer.lap().seconds() == 2.0


def test_torch_is_as_before_after_the_loop() -> None:
    before = [dist.Work.wait, collectives.around_wait]
    with pytest.raises(KeyError), ComputeTimer(Clock()):
        assert dist.Work.wait is not before[0]
        raise KeyError
    assert [dist.Work.wait, collectives.around_wait] == before


def test_a_gpu_is_timed_by_events_of_its_compute_stream() -> None:
    """The device reaches the events one after another, a second apart; streams are names here."""
    reached = iter(range(100))

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream == "compute"
            self.time = next(reached)

        def elapsed_time(self, end: Any) -> float:
            return 1000.0 * (end.time - self.time)

    class Stream(str):
        def wait_event(self, event: Any) -> None:
            pass

        wait_stream = wait_event

    current = ["compute"]
    cuda = SimpleNamespace(Event=Event, Stream=Stream, current_stream=lambda: current[-1])
    with mock.patch.object(torch, "cuda", cuda):
        clock = StreamClock()
        clock.waits = (clock.waits[0], clock.waits[2]._replace(owner=Stream))
        with ComputeTimer(clock) as timer:  # 0
            Stream("compute").wait_event(None)  # 1, 2
            Stream("gathers").wait_event(None)  # runs beside the compute stream
            current.append("gathers")
            with timer.exclude_wait():
                pass
            current.pop()
            Stream("compute").wait_stream("gathers")  # 3, 4
            lap = timer.lap()  # 5
    assert lap.seconds() == 3.0, "five seconds, less two waits of one"


def check(in_processes: Any, folder: Path, ranks: int, layouts: list[str], **more: Any) -> None:
    result = in_processes(ranks, "timed_ranks.compute_times", folder, layouts=layouts, **more)
    for layout, (slow, pairs) in result.items():
        compute_times, whole = zip(*pairs, strict=True)
        naps = compute_times[slow]
        assert naps >= 1.0, layout
        assert compute_times == tuple(naps * (rank == slow) for rank in range(ranks)), layout
        assert whole == (naps,) * ranks, "control: the whole step does not show who was slow"


@pytest.mark.slow
def test_the_slow_rank_is_seen_and_its_peers_wait(in_processes: Any, tmp_path: Path) -> None:
    check(in_processes, tmp_path, 2, TWO)


@pytest.mark.long
def test_stages_parts_and_replicas_wait_too(in_processes: Any, tmp_path: Path) -> None:
    check(in_processes, tmp_path, 4, FOUR)
