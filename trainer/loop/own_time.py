"""The time of a rank in a step, without the time in which it waits for other ranks.

    CPU   the wall clock from the end of one step to that of the next, less the time inside waits
    GPU   the same on the compute stream, between events: the host reads them after the step

A rank whose own time is long holds up the others, and they wait for it in collectives. torch has no
hook for the begin of a wait, so the methods in which a rank waits are replaced while the loop runs.
Waits inside blocks that torch.compile has compiled count as own time.
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
"""Methods of process groups. On a GPU some run on the compute stream itself."""


class Waits(NamedTuple):
    """Methods of a class in which ranks wait."""

    owner: Any
    names: Sequence[str]
    streams: bool = False
    """True if the object itself is the stream that waits; else the current stream waits."""


@dataclass(frozen=True)
class Lap:
    """Time from the end of one step to the end of the next, as marks of a clock."""

    begin: Any
    end: Any
    waits: list[tuple[Any, Any]]
    between: Callable[[Any, Any], float]

    def seconds(self) -> float:
        """Return the seconds without waits. Call when the device has reached the end."""
        waited = sum(self.between(begin, end) for begin, end in self.waits)
        return max(0.0, self.between(self.begin, self.end) - waited)


class HostClock:
    """The clock of a rank on the CPU. The threads that write checkpoints wait beside it."""

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
    """The clock of a rank on a GPU: events on the compute stream. Other streams run beside it."""

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
        """True of the thread of the loop and autograd's, which torch starts itself."""
        ours = threading.current_thread()
        known = ours is threading.main_thread() or isinstance(ours, threading._DummyThread)
        return known and (stream or torch.cuda.current_stream()) == self.stream


@dataclass
class OwnTime:
    """Measures a rank's own time in each step, inside of a `with`."""

    clock: HostClock | StreamClock
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    waiting: bool = False

    def __enter__(self) -> OwnTime:
        self.replaced: list[tuple[Any, str, Any]] = []
        for owner, names, streams in self.clock.waits:
            for name in names:
                if hasattr(owner, name):  # by the version of torch
                    original = getattr(owner, name)
                    self.replaced.append((owner, name, original))
                    setattr(owner, name, self._timed(original, streams=streams))
        collectives.around_wait = self.around
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for owner, name, original in self.replaced:
            setattr(owner, name, original)
        collectives.around_wait = contextlib.nullcontext

    def restart(self) -> None:
        """Begin a step now: leave out the time since the last one."""
        self.waits, self.begin = [], self.clock.mark()

    def lap(self) -> Lap:
        """End a step, and begin the next."""
        begin, waits = self.begin, self.waits
        self.restart()
        return Lap(begin, self.begin, waits, self.clock.between)

    @contextlib.contextmanager
    def around(self, stream: Any = None) -> Iterator[None]:
        """Leave out the time inside of this context, if the clock sees it."""
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
            with self.around(owner if streams else None):
                return original(owner, *arguments, **options)

        return timed


def own_time(device: torch.device) -> OwnTime:
    """Return the measurement of a rank on this device."""
    return OwnTime(StreamClock() if device.type == "cuda" else HostClock())
