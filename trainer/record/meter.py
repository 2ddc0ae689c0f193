"""Measure step times and peak memory on all ranks, for a run whose layout has a prediction."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from ...dataplane.order.row_lengths import name_steps
from ..layout.devices import DeviceKind
from ..loop.batches import RunPlan
from ..loop.hooks.hook import Hook
from .speed import peak_memory
from .steps import NullRecorder, RunRecorder

if TYPE_CHECKING:
    from ..checkpoints.store import RunState

COLD = 2
"""First steps that are not timed: they allocate, compile and warm up. On a CPU, memory is read in
the second one."""

TENSOR_TYPES: tuple[type[Any], ...] = (torch.Tensor, torch.nn.Parameter)
"""Types with a storage; subclasses may wrap tensors."""


@dataclass
class Meter:
    """Measures the steps on one rank.

    A GPU's allocator counts bytes itself. On a CPU, the peak is computed from the tensors alive
    before the second step and from that step's allocations, which torch's profiler reports.
    """

    device: torch.device
    profiled: bool = True
    """False if torch's profiler is in use elsewhere: memory on a CPU is then unknown."""
    marks: list[tuple[int, float, float]] = field(default_factory=list)
    """Number, start time and start CPU time by step."""
    peak: int | None = None
    """Peak bytes in tensors."""

    def __post_init__(self) -> None:
        self.profiler: Any = None
        self.bytes_before = 0

    def begin(self, step: int) -> None:
        """Record that a step begins."""
        if len(self.marks) == COLD:
            self._read_peak()
        self._mark(step)
        if len(self.marks) == COLD and self.device.type == "cpu" and self.profiled:
            self.bytes_before = live_bytes()
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.start()

    def end(self) -> None:
        """Record that the last step has ended."""
        self._read_peak()
        last_step = self.marks[-1][0] if self.marks else 0
        self._mark(last_step + 1)
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)

    def peak_steps(self) -> list[int]:
        """Return the steps that `peak` covers: on a GPU all since this start, on a CPU the
        second."""
        steps = [step for step, *_ in self.marks[:-1]]
        if self.peak is None:
            return []
        return steps if self.device.type == "cuda" else steps[COLD - 1 : COLD]

    def timed_steps(self) -> list[tuple[int, float, float]]:
        """Return number, seconds and CPU seconds by step, without the cold ones."""
        pairs = zip(self.marks[COLD:], self.marks[COLD + 1 :], strict=False)
        return [
            (step, end - start, cpu_end - cpu_start)
            for (step, start, cpu_start), (_, end, cpu_end) in pairs
        ]

    def _mark(self, step: int) -> None:
        self.marks.append((step, time.perf_counter(), time.process_time()))

    def _read_peak(self) -> None:
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        roots = profiler.profiler.kineto_results.experimental_event_tree()
        self.peak = self.bytes_before + find_peak(allocations(roots), live_storages().keys())


class MeterSteps(Hook):
    """Measures a run's steps, to compare them with the layout's prediction."""

    def __init__(
        self,
        meter: Meter,
        plan: RunPlan,
        group: dist.ProcessGroup,
        recorder: RunRecorder | NullRecorder,
    ) -> None:
        self.meter = meter
        self.plan = plan
        self.group = group
        self.recorder = recorder

    def step_begins(self, step: int) -> None:
        self.meter.begin(step)

    def ended(self, state: RunState, *, finished: bool) -> None:
        self.meter.end()
        measurements = gather_measurements(self.meter, self.plan, self.group)
        self.recorder.event("measured", state.step, **measurements)


class PeakMemory(Hook):
    """Reports this rank's peak memory."""

    def __init__(self, device: DeviceKind) -> None:
        self.device = device

    def measure(self) -> Mapping[str, Any]:
        return {"memory": peak_memory(self.device)}


@dataclass(frozen=True)
class Allocation:
    """An allocator event."""

    time: int
    address: int
    size: int
    """Bytes allocated; negative for bytes freed."""


def allocations(roots: Iterable[Any]) -> Iterator[Allocation]:
    """Yield the allocator events in the profiler's event tree."""
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield Allocation(event.start_time_ns, fields.ptr, fields.alloc_size)


def find_peak(allocations: Iterable[Allocation], alive: Collection[int] = ()) -> int:
    """Return the largest sum of sizes over time. `alive` are the addresses in use at the end.

    The profiler misses frees on gloo's threads, for tensors that they sent. An allocation without
    its free is left out, unless its address is alive.
    """
    events = sorted(allocations, key=lambda event: event.time)
    unfreed: dict[int, int] = {}
    missed = set()
    for number, event in enumerate(events):
        previous = unfreed.pop(event.address, None)
        if event.size > 0:
            if previous is not None:
                missed.add(previous)
            unfreed[event.address] = number
    missed |= {number for address, number in unfreed.items() if address not in alive}
    sizes = (event.size for number, event in enumerate(events) if number not in missed)
    return max(accumulate(sizes, initial=0))


def live_bytes() -> int:
    """Return the bytes of all tensors in host memory."""
    return sum(live_storages().values())


def live_storages() -> dict[int, int]:
    """Return the bytes of all tensor storages in host memory, by address."""
    sizes: dict[int, int] = {}
    for tensor in gc.get_objects():
        if type(tensor) in TENSOR_TYPES and tensor.device.type == "cpu":
            owners: list[Any] = [tensor, tensor.grad if tensor.is_leaf else None]
            storages = [owner.untyped_storage() for owner in owners if type(owner) in TENSOR_TYPES]
            sizes |= {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sizes


def gather_measurements(meter: Meter, plan: RunPlan, group: dist.ProcessGroup) -> dict[str, Any]:
    """Gather all ranks' measurements: by phase the longest median step of any rank, peak bytes by
    rank, and the phases that the peak covers. Collective."""
    times: dict[str, list[tuple[float, float]]] = {}
    timed_steps = [*meter.timed_steps()]
    names = name_steps(plan, [step for step, _, _ in timed_steps])
    for name, (_, seconds, cpu_seconds) in zip(names, timed_steps, strict=True):
        times.setdefault(name, []).append((seconds, cpu_seconds))
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (_median_times(times), meter.peak), group=group)
    phases = {
        phase: {
            "steps": len(times[phase]),
            "seconds": max(medians[phase][0] for medians, _ in ranks),
            "cpu_seconds": max(medians[phase][1] for medians, _ in ranks),
        }
        for phase in times
    }
    peak_phases = dict.fromkeys(name_steps(plan, [*meter.peak_steps()]))
    return {
        "phases": phases,
        "memory": [peak for _, peak in ranks],
        "memory_phases": [*peak_phases],
    }


def _median_times(times: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    return {
        phase: (
            statistics.median(seconds for seconds, _ in steps),
            statistics.median(cpu_seconds for _, cpu_seconds in steps),
        )
        for phase, steps in times.items()
    }
