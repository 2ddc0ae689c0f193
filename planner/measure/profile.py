"""Measurement of a machine into a hardware YAML, row by row.

The file is written after each step, and rows that it has are not measured again: the same command
continues after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...console.errors import PlanError
from ...console.log import get_logger
from ...console.progress import Progress
from ...trainer.record.speed import memory_used
from ..hardware import Hardware
from ..hardware.file import (
    AttentionRate,
    CollectiveRate,
    Device,
    HardwareFile,
    HardwareRow,
    KernelRate,
    MatmulRate,
    MemoryRate,
    Overhead,
    Overlap,
    Reserved,
    Source,
)
from . import kernels, overlap
from .clock import Clock
from .collectives import Group, Shape, World, group_of, known, round_size, sweep
from .launches import launch_seconds

logger = get_logger(__name__)

TABLES: dict[type[HardwareRow], str] = {
    MatmulRate: "matmul",
    MemoryRate: "memory",
    AttentionRate: "attention",
    KernelRate: "kernels",
    CollectiveRate: "collectives",
}
EXPERTS = 8
"""Products of a grouped one."""


@dataclass(frozen=True)
class Sizes:
    """Sizes that a profile measures."""

    precision: str
    sides: tuple[int, ...]
    """m, k and n of matrix products: every combination."""
    copies: tuple[int, ...]
    """Bytes of copies."""
    heads: int
    head_widths: tuple[int, ...]
    widths: tuple[int, ...]
    """Channels of kernels."""
    lengths: tuple[int, ...]
    """Tokens of a row, for attention and kernels."""
    tokens: int
    """Tokens of a micro-batch of several rows."""
    vocabularies: tuple[int, ...]
    messages: tuple[int, ...]
    """Sizes of collectives in bytes."""
    budget: float
    """Seconds of a measurement."""


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES: dict[tuple[str, bool], Sizes] = {
    ("cuda", False): Sizes(
        "bf16",
        sides=(1024, 4096, 16384),
        copies=(MIB, 16 * MIB, 256 * MIB, GIB),
        heads=16,
        head_widths=(64, 128),
        widths=(1024, 4096),
        lengths=(512, 2048, 8192, 32768),
        tokens=16384,
        vocabularies=(512, 32768, 131072),
        messages=(64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB, 256 * MIB, GIB),
        budget=0.3,
    ),
    ("cuda", True): Sizes(
        "bf16",
        sides=(2048, 8192),
        copies=(16 * MIB, GIB),
        heads=16,
        head_widths=(128,),
        widths=(4096,),
        lengths=(2048, 8192),
        tokens=16384,
        vocabularies=(32768,),
        messages=(MIB, 64 * MIB),
        budget=0.1,
    ),
    ("cpu", False): Sizes(
        "fp32",
        sides=(128, 512, 2048),
        copies=(64 * KIB, MIB, 16 * MIB, 128 * MIB),
        heads=4,
        head_widths=(32, 64),
        widths=(128, 512),
        lengths=(128, 512, 2048),
        tokens=2048,
        vocabularies=(512, 8192),
        messages=(4 * KIB, 64 * KIB, MIB, 16 * MIB),
        budget=0.2,
    ),
    ("cpu", True): Sizes(
        "fp32",
        sides=(64, 256),
        copies=(64 * KIB, MIB),
        heads=2,
        head_widths=(32,),
        widths=(64,),
        lengths=(64, 128),
        tokens=128,
        vocabularies=(512,),
        messages=(4 * KIB, 256 * KIB),
        budget=0.005,
    ),
}
"""Sizes by the kind of device, and whether the profile is quick."""


TURNS = (2.0, 2.0)
"""Slow-downs of computation and messages that share one processor: each waits half of the time, so
both together take the sum of their times. So it is where CPU time is measured."""


@dataclass(frozen=True)
class Step:
    """Rows that one measurement gives: their fields, without the rates that `measure` returns."""

    kind: type[HardwareRow]
    rows: tuple[dict[str, Any], ...]
    measure: Callable[[], Sequence[float]]


class Profile:
    """A hardware file that grows by rows of one source."""

    def __init__(self, file: HardwareFile, path: Path, source: str) -> None:
        self.file = file
        self.path = path
        self.source = source

    def lacks(self, step: Step) -> bool:
        """Return True if a row of the step is not in the file."""
        names = [name for name in step.rows[0] if name != "source"]
        table = getattr(self.file, TABLES[step.kind])
        known = {tuple(getattr(row, name) for name in names) for row in table}
        return any(tuple(row[name] for name in names) not in known for row in step.rows)

    def add(self, step: Step, rates: Sequence[float]) -> None:
        """Add the rows of a step and write the file."""
        made: Any = step.kind
        rows = tuple(
            made(**fields, rate=rate, source=self.source)
            for fields, rate in zip(step.rows, rates, strict=True)
        )
        table = TABLES[step.kind]
        self.update(**{table: (*getattr(self.file, table), *rows)})

    def update(self, **fields: Any) -> None:
        """Replace fields and write the file."""
        self.file = replace(self.file, **fields)
        Hardware(self.file, str(self.path)).save(self.path)


def begin(path: Path, name: str | None, device: torch.device, per_node: int, mode: str) -> Profile:
    """Open or create the file of this machine."""
    about = _about(device, per_node)
    today = date.today().isoformat()
    key = f"{mode}-{today}"
    on_gpu = device.type == "cuda"
    threads = about.get("threads")
    on_cpu = "CPU time of one thread" if threads == 1 else f"{threads} threads"
    on = f"CUDA {torch.version.cuda}" if on_gpu else on_cpu
    text = f"`trainer profile` ({mode}), torch {torch.__version__}, {on}"
    source = Source(kind="measured", date=today, text=text)
    held = Reserved(bytes=_reserved(device), source=key)
    if not path.exists():
        file = HardwareFile(
            name=name or path.stem,
            devices_per_node=per_node,
            sources={key: source},
            device=Device(**about, source=key),
            reserved=held,
        )
        return Profile(file, path, key)
    file = Hardware.load(path).file
    for what, here, there in (
        ("device", about["name"], file.device.name),
        ("number of devices on a node", per_node, file.devices_per_node),
        ("number of threads of a rank", about.get("threads"), file.device.threads),
    ):
        if there not in (here, None):
            message = f"{path} describes another machine: its {what} is {there}, not {here}"
            raise PlanError(message, hint="give another --out, or the same --processes")
    file = replace(
        file,
        sources={**file.sources, key: source},
        reserved=max(held, file.reserved, key=lambda each: each.bytes),
    )
    return Profile(file, path, key)


def measure_device(profile: Profile, sizes: Sizes, clock: Clock) -> int:
    """Measure what one device computes; return the number of steps that had no rows yet."""
    launches = profile.file.overhead is None and clock.device.type == "cpu"
    if launches:  # a GPU computes while its host launches the next operations
        each = launch_seconds(clock)
        profile.update(overhead=Overhead(operation=each, step=0.0, source=profile.source))
    steps = [step for step in device_steps(sizes, clock) if profile.lacks(step)]
    with Progress("profiling", total=len(steps)) as progress:
        for step in steps:
            try:
                profile.add(step, step.measure())
            except torch.OutOfMemoryError:
                logger.warning("skipped, out of memory: %s %s", TABLES[step.kind], step.rows[0])
            progress.advance()
    return len(steps) + launches


def device_steps(sizes: Sizes, clock: Clock) -> Iterator[Step]:
    """Yield the measurements of one device."""
    for size in sizes.copies:
        yield Step(MemoryRate, ({"bytes": size},), partial(_one, kernels.copy_rate, size, clock))
    shapes = [(m, k, n, 1) for m in sizes.sides for k in sizes.sides for n in sizes.sides]
    side = sizes.sides[-2]
    shapes += [(m, side, side, EXPERTS) for m in sizes.sides[:-1]]
    for m, k, n, groups in shapes:
        fields: dict[str, Any] = {"m": m, "k": k, "n": n, "groups": groups}
        fields["precision"] = sizes.precision
        run = partial(kernels.matmul_rate, m, k, n, groups, sizes.precision, clock)
        yield Step(MatmulRate, (fields,), partial(_one, run))
    for length in sizes.lengths:
        rows = max(sizes.tokens // length, 1)
        for width in sizes.head_widths:
            fields = {"head_width": width, "heads": sizes.heads, "length": length}
            fields["precision"] = sizes.precision
            yield Step(
                AttentionRate,
                _directions(fields),
                partial(
                    kernels.attention_rates,
                    *(sizes.heads, width, length, rows, sizes.precision, clock),
                ),
            )
        for width in sizes.widths:
            draw = kernels.Draw(rows, length, width, sizes.precision, clock.device)
            for kernel in kernels.KERNELS:
                for size in kernels.sizes_of(kernel, length, sizes.vocabularies):
                    fields = {"width": width, "length": length, "size": size}
                    fields |= {"kernel": kernel, "precision": sizes.precision}
                    run_kernel = partial(kernels.kernel_rates, kernel, draw, size, clock)
                    yield Step(KernelRate, _directions(fields), run_kernel)


def measure_links(profile: Profile | None, world: World, sizes: Sizes, clock: Clock) -> None:
    """Measure collectives and overlap; rank 0 has the profile and writes it."""
    widest = {shape.link: shape for shape in world.shapes()}
    for shape in world.shapes():
        with group_of(world, shape) as group:
            _measure_collectives(profile, world, group, sizes, clock)
            if shape == widest[shape.link]:
                _measure_overlap(profile, world, group, sizes, clock)
    if profile is not None:  # with the buffers of all collectives
        held = Reserved(bytes=_reserved(world.device), source=profile.source)
        profile.update(reserved=max(held, profile.file.reserved, key=lambda each: each.bytes))


def _measure_collectives(
    profile: Profile | None, world: World, group: Group, sizes: Sizes, clock: Clock
) -> None:
    shape = group.shape
    for name in known(()):
        if name == "p2p" and shape.ranks > 2:
            continue
        messages = [round_size(name, size, shape.ranks) for size in sizes.messages]
        wanted = _of_rank_0(
            [
                size
                for size in messages
                if profile is not None and profile.lacks(_collective(name, shape, size))
            ]
        )
        for time in sweep(world, group, name, wanted, clock):
            if profile is not None:
                profile.add(_collective(name, shape, time.bytes), (time.busbw,))


def _measure_overlap(
    profile: Profile | None, world: World, group: Group, sizes: Sizes, clock: Clock
) -> None:
    link = group.shape.link
    if not _of_rank_0(profile is not None and link not in profile.file.overlap):
        return
    size, side = sizes.messages[-1], sizes.sides[-1]
    slower = TURNS
    if not clock.counts_cpu:
        slower = overlap.measure(world, group, size, side, sizes.precision, clock)
    if profile is not None:
        row = Overlap(compute=slower[0], communication=slower[1], source=profile.source)
        profile.update(overlap={**profile.file.overlap, link: row})


def _collective(name: str, shape: Shape, size: int) -> Step:
    fields = {"collective": name, "ranks": shape.ranks, "per_node": shape.per_node, "bytes": size}
    return Step(CollectiveRate, (fields,), tuple)


def _of_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _directions(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple(fields | {"direction": direction} for direction in ("forward", "backward"))


def _one(measure: Callable[..., float], *arguments: Any) -> tuple[float]:
    return (measure(*arguments),)


def _about(device: torch.device, per_node: int) -> dict[str, Any]:
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    if kind == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return {"name": torch.cuda.get_device_name(device), "kind": kind, "memory": total}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory, threads = total // per_node, torch.get_num_threads()
    return {"name": _cpu_name(), "kind": kind, "memory": memory, "threads": threads}


def _cpu_name() -> str:
    """Return the processor's name, where the system has it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _reserved(device: torch.device) -> int:
    """Return the bytes of a device that are in use and hold no tensor of torch's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    return memory_used("cpu")
