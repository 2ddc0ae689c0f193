"""Attribution of a trace: which operation spends the device's time in a step.

A launch belongs to the innermost operation of headrace around it, else to the engine's range, to
FSDP's, or to the outermost operation of torch: the trace links each launch to a call of the driver,
and the operations on the call's thread contain that call. On the CPU the time of an operation
itself, without those that it calls, stands for a launch.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE = "engine of headrace"
"""Name of the range around the norm of the gradients, clipping and the optimizer step."""
ROWS = 40
"""Operations that a table lists."""
HOST = ("cpu_op", "user_annotation")
CALLS = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events."""
TORCH = ("aten::", "fsdp::", "torch_attn::", "c10d::")
PROGRAM = 48
"""Characters of a program's name: templates of C++ have thousands."""

Event = dict[str, Any]


@dataclass(frozen=True)
class DeviceLaunch:
    """A program on the device, or an operation on the CPU."""

    owner: str
    start: float
    end: float
    self_time: float
    """Microseconds, as all times of a trace."""


@dataclass(frozen=True)
class Operation:
    name: str
    milliseconds: float
    launches: float


@dataclass(frozen=True)
class Attribution:
    """Device time of a step by operation, the largest first. Launches on two streams at once count
    twice, so the shares and the idle one may exceed 1 together."""

    milliseconds: float
    """From the first launch to the last one's end."""
    idle: float
    """Share of the time in which nothing ran."""
    operations: Sequence[Operation]

    def render(self, rows: int = ROWS) -> str:
        """Return a table of the largest operations."""
        lines = [f"{'ms a step':>9} {'share':>6} {'launches':>8}  operation"]
        shown, rest = self.operations[:rows], self.operations[rows:]
        if rest:
            total = sum(operation.milliseconds for operation in rest)
            launches = sum(operation.launches for operation in rest)
            shown = [*shown, Operation(f"{len(rest)} more", total, launches)]
        for operation in shown:
            share = operation.milliseconds / (self.milliseconds or 1)
            lines.append(
                f"{operation.milliseconds:9.2f} {share:6.1%} {operation.launches:8.0f}"
                f"  {operation.name}"
            )
        lines.append(f"{self.idle * self.milliseconds:9.2f} {self.idle:6.1%} {'':8}  idle")
        lines.append(f"{self.milliseconds:9.2f} {'':6} {'':8}  a step")
        return "\n".join(lines)


def read_trace(file: Path) -> list[Event]:
    """Return the events of a trace that torch wrote."""
    with gzip.open(file, "rt", encoding="utf-8", errors="replace") as text:
        events: list[Event] = json.load(text, strict=False)["traceEvents"]
    return events


def attribute(events: Iterable[Event], steps: int) -> Attribution:
    """Attribute the time of some traced steps: the device's, or that of the CPU if no program ran
    on a device."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    launches = list(_launches(timed)) or list(_operations(timed))
    if not launches:
        return Attribution(0.0, 0.0, ())
    first = min(launch.start for launch in launches)
    span = max(launch.end for launch in launches) - first
    by_owner: defaultdict[str, list[DeviceLaunch]] = defaultdict(list)
    for launch in launches:
        by_owner[launch.owner].append(launch)
    operations = [
        Operation(
            owner,
            sum(launch.self_time for launch in of_owner) / 1e3 / steps,
            len(of_owner) / steps,
        )
        for owner, of_owner in by_owner.items()
    ]
    operations.sort(key=lambda operation: -operation.milliseconds)
    busy = _union((launch.start, launch.end) for launch in launches)
    return Attribution(span / 1e3 / steps, 1 - busy / span if span else 0.0, operations)


def _launches(timed: Sequence[Event]) -> Iterator[DeviceLaunch]:
    """Yield the programs that the traced steps launched. The device may still run those of an
    earlier step: their calls are not in the trace."""
    callers = {
        event["args"]["correlation"]: [around["name"] for around in containing]
        for event, containing in nest_events(timed)
        if event["cat"] in CALLS and "correlation" in event.get("args", {})
    }
    for event in timed:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in DEVICE and correlation in callers:
            owner = _name_owner(callers[correlation], event["name"])
            yield DeviceLaunch(owner, event["ts"], event["ts"] + event["dur"], event["dur"])


def _operations(timed: Sequence[Event]) -> Iterator[DeviceLaunch]:
    """Yield the operations on the CPU, each with the time that no operation within it takes."""
    inner: defaultdict[int, float] = defaultdict(float)
    operations = []
    for event, containing in nest_events(timed):
        if event["cat"] == "cpu_op":
            operations.append((event, [around["name"] for around in containing]))
            callers = [around for around in containing if around["cat"] == "cpu_op"]
            if callers:
                inner[id(callers[-1])] += event["dur"]
    for event, names in operations:
        owner = _name_owner([*names, event["name"]], event["name"])
        self_time = event["dur"] - inner[id(event)]
        yield DeviceLaunch(owner, event["ts"], event["ts"] + event["dur"], self_time)


def nest_events(timed: Sequence[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yield each event of the host, with the operations and ranges around it, outermost first."""
    threads: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in timed:
        if event.get("cat") in HOST + CALLS:
            threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        containing: list[Event] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while containing and containing[-1]["ts"] + containing[-1]["dur"] <= event["ts"]:
                containing.pop()
            yield event, list(containing)
            if event["cat"] in HOST:
                containing.append(event)


def _name_owner(around: Sequence[str], program: str) -> str:
    """Return the name of what launches a program, from the operations around the launch."""
    program = program[:PROGRAM]
    of_torch = next((name for name in around if name.startswith(TORCH)), None)
    caller = of_torch or "outside of operations"
    for name in reversed(around):
        if name.startswith("headrace::"):
            return f"{name}: {program}"
    if ENGINE in around:
        return f"engine, {caller}: {program}"
    ranges = [name.partition(" (")[0] for name in around if name.startswith("FSDP")]
    return f"{ranges[-1]}, {caller}" if ranges else f"{caller}: {program}"


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
