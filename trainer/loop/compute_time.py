"""Compute time: a rank's time in a step without waits for other ranks.

    CPU   wall-clock time from the end of a step to the end of the next, minus waits
    GPU   the same on the compute stream, between events: the host reads them after the step

Ranks wait in collectives for the rank with the longest compute time. torch has no hook where a wait
begins, so methods in which a rank waits are replaced while the loop runs. Waits inside blocks that
torch.compile has compiled count as compute time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...models.parallel import collectives

COLLECTIVES = (
    *("allgather", "_allgather_base", "all_gather_single", "allreduce", "allreduce_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "broadcast", "recv"),
    *("alltoall", "alltoall_base", "all_to_all_single", "allgather_into_tensor_coalesced"),
    "reduce_scatter_tensor_coalesced",
)
"""Methods of process groups. On a GPU, some run on the compute stream itself."""


class Waits(NamedTuple):
    """Methods in which ranks wait."""

    owner: Any
    """Class that has the methods."""
    methods: Sequence[str]
    streams: bool = False
    """True if the object itself is the waiting stream; else the current stream waits."""


@dataclass(frozen=True)
class Lap:
    """Time from the end of a step to the end of the next, as clock marks."""

    begin: Any
    end: Any
    waits: list[tuple[Any, Any]]
    between: Callable[[Any, Any], float]

    def seconds(self) -> float:
        """Return the compute time in seconds. Call when the device has reached the end."""
        waited = sum(self.between(begin, end) for begin, end in self.waits)
        return max(0.0, self.between(self.begin, self.end) - waited)


class HostClock:
    """A CPU rank's clock. It ignores waits in other threads, which write checkpoints."""

    waits = (Waits(dist.Work, ("wait",)),)

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def counts(self, stream: Any) -> bool:
        return threading.get_ident() == self.thread


class StreamClock:
    """A GPU rank's clock: events on the compute stream. It ignores other streams."""

    waits = (
        Waits(dist.Work, ("wait",)),
        Waits(dist.ProcessGroup, COLLECTIVES),
        Waits(torch.cuda.Stream, ("wait_event", "wait_stream"), streams=True),
    )

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1000

    def counts(self, stream: Any) -> bool:
        """True in the loop's thread and in autograd's threads, which torch starts itself."""
        thread = threading.current_thread()
        computes = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
        return computes and (stream or torch.cuda.current_stream()) == self.stream


@dataclass
class ComputeTimer:
    """Context manager that measures a rank's compute time, step by step."""

    clock: HostClock | StreamClock
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    waiting: bool = False

    def __enter__(self) -> ComputeTimer:
        self.replaced: list[tuple[Any, str, Any]] = []
        for owner, methods, streams in self.clock.waits:
            for method in methods:
                if hasattr(owner, method):  # depends on torch's version
                    original = getattr(owner, method)
                    self.replaced.append((owner, method, original))
                    setattr(owner, method, self._timed(original, streams=streams))
        collectives.around_wait = self.exclude_wait
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for owner, method, original in self.replaced:
            setattr(owner, method, original)
        collectives.around_wait = contextlib.nullcontext

    def restart(self) -> None:
        """Begin a step now: exclude the time since the last lap."""
        self.waits, self.begin = [], self.clock.mark()

    def lap(self) -> Lap:
        """End a step, and begin the next."""
        begin, waits = self.begin, self.waits
        self.restart()
        return Lap(begin, self.begin, waits, self.clock.between)

    @contextlib.contextmanager
    def exclude_wait(self, stream: Any = None) -> Iterator[None]:
        """Exclude the time inside this context, if the clock counts it."""
        if self.waiting or not self.clock.counts(stream):
            yield
            return
        self.waiting, begin = True, self.clock.mark()
        try:
            yield
        finally:
            self.waiting = False
            self.waits.append((begin, self.clock.mark()))

    def _timed(self, original: Callable[..., Any], *, streams: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(owner: Any, *arguments: Any, **options: Any) -> Any:
            with self.exclude_wait(owner if streams else None):
                return original(owner, *arguments, **options)

        return timed


def start_timer(device: torch.device) -> ComputeTimer:
    """Return a timer with the device's clock."""
    return ComputeTimer(StreamClock() if device.type == "cuda" else HostClock())
