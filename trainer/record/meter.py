"""Time of the steps and memory of every rank, for a run whose layout has a prediction."""

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

from ..layout.devices import DeviceKind
from ..loop.batches import RunPlan
from ..loop.hooks.hook import Hook
from .speed import memory_used
from .steps import NullRecorder, RunRecorder

if TYPE_CHECKING:
    from ..checkpoints.store import RunState

COLD = 2
"""First steps of a start that do not count: they allocate, compile and warm up. The second one is
the step whose memory is read on a CPU."""

PLAIN: tuple[type[Any], ...] = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors with memory of their own."""


@dataclass
class Meter:
    """Measures the steps of one rank.

    A GPU's allocator counts the bytes of tensors itself. On a CPU they are those of the tensors
    that live before the second step, and of that step's allocations, which torch's profiler
    reports.
    """

    device: torch.device
    profiled: bool = True
    """False if something else uses torch's profiler: the memory of a CPU is then unknown."""
    marks: list[tuple[int, float, float]] = field(default_factory=list)
    """Number, time and CPU time at which each step began."""
    peak: int | None = None
    """Most bytes of tensors."""

    def __post_init__(self) -> None:
        self.events: Any = None
        self.before = 0

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        if len(self.marks) == COLD:
            self._read()
        self._mark(step)
        if len(self.marks) == COLD and self.device.type == "cpu" and self.profiled:
            self.before = live_bytes()
            self.events = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.events.start()

    def end(self) -> None:
        """Note that the last step has ended."""
        self._read()
        last = self.marks[-1][0] if self.marks else 0
        self._mark(last + 1)
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)

    def read_steps(self) -> list[int]:
        """Return the steps whose most bytes `peak` is: all of this start, on a CPU the second."""
        done = [step for step, *_ in self.marks[:-1]]
        if self.peak is None:
            return []
        return done if self.device.type == "cuda" else done[COLD - 1 : COLD]

    def steps(self) -> list[tuple[int, float, float]]:
        """Return number, seconds and CPU seconds of each step that counts."""
        pairs = zip(self.marks[COLD:], self.marks[COLD + 1 :], strict=False)
        return [(step, end - begin, used - cpu) for (step, begin, cpu), (_, end, used) in pairs]

    def _mark(self, step: int) -> None:
        self.marks.append((step, time.perf_counter(), time.process_time()))

    def _read(self) -> None:
        if self.events is None:
            return
        events, self.events = self.events, None
        events.stop()
        roots = events.profiler.kineto_results.experimental_event_tree()
        self.peak = self.before + highest(allocations(roots), live_storages().keys())


class MeterSteps(Hook):
    """Measures the steps of a run, for the comparison with the prediction of its layout."""

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
        found = gathered(self.meter, self.plan, self.group)
        self.recorder.event("measured", state.step, **found)


class PeakMemory(Hook):
    """Reports the most bytes that this rank has held."""

    def __init__(self, device: DeviceKind) -> None:
        self.device = device

    def measure(self) -> Mapping[str, Any]:
        return {"memory": memory_used(self.device)}


@dataclass(frozen=True)
class Allocation:
    """An event of the allocator."""

    time: int
    address: int
    size: int
    """Bytes given out, or, below 0, given back."""


def allocations(roots: Iterable[Any]) -> Iterator[Allocation]:
    """Yield the allocator's events from the profiler's tree of events."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield Allocation(event.start_time_ns, fields.ptr, fields.alloc_size)


def highest(events: Iterable[Allocation], alive: Collection[int] = ()) -> int:
    """Return the highest sum of the events in the order of time. `alive` are the addresses that are
    in use at the end.

    The profiler does not see what gloo's threads give back: tensors that they sent. Memory whose
    return is missing does not count.
    """
    in_order = sorted(events, key=lambda event: event.time)
    unreturned: dict[int, int] = {}
    missing = set()
    for number, event in enumerate(in_order):
        earlier = unreturned.pop(event.address, None)
        if event.size > 0:
            if earlier is not None:
                missing.add(earlier)
            unreturned[event.address] = number
    missing |= {number for address, number in unreturned.items() if address not in alive}
    seen = (event.size for number, event in enumerate(in_order) if number not in missing)
    return max(accumulate(seen, initial=0))


def live_bytes() -> int:
    """Return the bytes of all tensors in host memory."""
    return sum(live_storages().values())


def live_storages() -> dict[int, int]:
    """Return the bytes of all tensors in host memory, by address."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in PLAIN and thing.device.type == "cpu":
            own: list[Any] = [thing, thing.grad if thing.is_leaf else None]
            storages = [each.untyped_storage() for each in own if type(each) in PLAIN]
            sizes |= {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sizes


def gathered(meter: Meter, plan: RunPlan, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return what all ranks measured: the longest median step of a rank, by phase; the bytes of
    each rank; and the phases in which the bytes were read. Collective."""
    mine: dict[str, list[tuple[float, float]]] = {}
    for step, *seconds in meter.steps():
        mine.setdefault(plan.step(step).phase.name, []).append((seconds[0], seconds[1]))
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (_medians(mine), meter.peak), group=group)
    phases = {
        name: {
            "steps": len(mine[name]),
            "seconds": max(by_phase[name][0] for by_phase, _ in ranks),
            "cpu_seconds": max(by_phase[name][1] for by_phase, _ in ranks),
        }
        for name in mine
    }
    read = dict.fromkeys(plan.step(step).phase.name for step in meter.read_steps())
    return {"phases": phases, "memory": [peak for _, peak in ranks], "memory_phases": [*read]}


def _medians(found: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    return {
        name: (statistics.median(a for a, _ in steps), statistics.median(b for _, b in steps))
        for name, steps in found.items()
    }
