"""Device time of traced steps by class of launch, with the classes of _launch_kinds.py.

A launch belongs to the operation of torch that made it: the trace links it to a call of the driver,
and the operations on the call's thread contain that call. On the CPU, in a dry run, the time of the
operations themselves stands for the time of their launches.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks._launch_kinds import kind_of_operation
from headrace.trainer.loop.hooks.attribution import CALLS, ENGINE, nest_events

KINDS = ("GEMM", "attention", "kernel", "glue", "engine")
ENGINE_RANGES = (ENGINE, "FSDP", "Optimizer.", "fsdp::", "c10d::", "nccl:")
"""First words of the names of the engine's ranges and operations."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Shares:
    """Device time of a step."""

    seconds: dict[str, float]
    """Time of the launches of each class."""
    launches: float
    busy: float
    """Time during which at least one launch ran."""

    def share(self, kind: str) -> float:
        return self.seconds[kind] / (sum(self.seconds.values()) or 1.0)


def kind_of_launch(operations: Sequence[str]) -> str:
    """Return the class of a launch from the operations that contain it, innermost last."""
    if any(name.startswith(ENGINE_RANGES) for name in operations):
        return "engine"
    kinds = [kind_of_operation(name) for name in operations if "::" in name]
    if "attention" in kinds:  # its operation calls others
        return "attention"
    # A compiled graph launches programs outside of any operation.
    return (kinds[-1] if kinds else None) or "glue"


def shares(events: Iterable[Event], steps: int, cuda: bool) -> Shares:
    """Return the device time of a step from the events of some traced steps."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    times: Counter[str] = Counter(dict.fromkeys(KINDS, 0.0))
    spans = []
    for kind, event, duration in _launches(timed) if cuda else _operations(timed):
        times[kind] += duration
        spans.append((event["ts"], event["ts"] + event["dur"]))
    scale = 1e-6 / steps  # a trace is in microseconds
    seconds = {kind: duration * scale for kind, duration in times.items()}
    return Shares(seconds, len(spans) / steps, scale * _union(spans))


def _launches(timed: Sequence[Event]) -> Iterator[tuple[str, Event, float]]:
    """Yield the class of each launch of the traced steps, its event, and its duration. The device
    may still run launches of an earlier step: their calls are not in the trace."""
    calls = {}
    for event, containing in nest_events(timed):
        if event["cat"] in CALLS and "correlation" in event.get("args", {}):
            calls[event["args"]["correlation"]] = [item["name"] for item in containing]
    for event in timed:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in DEVICE and correlation in calls:
            yield kind_of_launch(calls[correlation]), event, event["dur"]


def _operations(timed: Sequence[Event]) -> Iterator[tuple[str, Event, float]]:
    """Yield the class of each operation on the CPU, its event, and its time without those that it
    calls."""
    inner: Counter[int] = Counter()
    result = []
    for event, containing in nest_events(timed):
        if event["cat"] == "cpu_op":
            result.append((event, [*(item["name"] for item in containing), event["name"]]))
            above = [item for item in containing if item["cat"] == "cpu_op"]
            if above:
                inner[id(above[-1])] += event["dur"]
    for event, names in result:
        yield kind_of_launch(names), event, event["dur"] - inner[id(event)]


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class Tracer:
    """Traces some steps into a file; `begin` is called when a step begins."""

    def __init__(self, steps: range, cuda: bool, file: Path) -> None:
        self.steps = steps
        self.cuda = cuda
        self.file = file
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self.profile = profile(activities=activities)

    def begin(self, step: int) -> None:
        if step == self.steps.start:
            self.profile.start()

    def result(self) -> Shares:
        """Stop the trace, write its file, and return the shares of a step."""
        self.profile.stop()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.profile.export_chrome_trace(str(self.file))  # compressed by its ending
        with gzip.open(self.file, "rt", encoding="utf-8", errors="replace") as text:
            events = json.load(text, strict=False)["traceEvents"]
        return shares(events, len(self.steps), self.cuda)
