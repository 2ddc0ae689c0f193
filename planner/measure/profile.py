"""Profile of a machine: measured into a hardware YAML, row by row.

The file is written after every measurement, and existing rows are not measured again: the same
command continues after an interruption.
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
from ...trainer.record.speed import peak_memory
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
from .collectives import (
    GroupShape,
    RankGroup,
    World,
    open_group,
    round_size,
    select_collectives,
    sweep,
)
from .launches import measure_launch_seconds

logger = get_logger(__name__)

TABLES: dict[type[HardwareRow], str] = {
    MatmulRate: "matmul",
    MemoryRate: "memory",
    AttentionRate: "attention",
    KernelRate: "kernels",
    CollectiveRate: "collectives",
}
EXPERTS = 8
"""Groups of a grouped product."""


@dataclass(frozen=True)
class ProfileSizes:
    """Sizes that a profile measures."""

    precision: str
    sides: tuple[int, ...]
    """m, k and n of matrix products: every combination."""
    copies: tuple[int, ...]
    """Bytes per copy."""
    heads: int
    head_widths: tuple[int, ...]
    widths: tuple[int, ...]
    """Kernel channels."""
    lengths: tuple[int, ...]
    """Tokens per row, for attention and kernels."""
    tokens: int
    """Tokens per micro-batch with several rows."""
    vocabularies: tuple[int, ...]
    messages: tuple[int, ...]
    """Bytes per collective."""
    budget: float
    """Seconds per measurement."""


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES: dict[tuple[str, bool], ProfileSizes] = {
    ("cuda", False): ProfileSizes(
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
    ("cuda", True): ProfileSizes(
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
    ("cpu", False): ProfileSizes(
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
    ("cpu", True): ProfileSizes(
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
"""Sizes by device type, and by whether the profile is quick."""


TURNS_SLOWDOWNS = (2.0, 2.0)
"""Slow-downs of computation and messages that take turns on one processor: both wait half of the
time, so together they take the sum of their times, as where CPU time is measured."""


@dataclass(frozen=True)
class Measurement:
    """Rows of a hardware file that are measured together."""

    row_type: type[HardwareRow]
    rows: tuple[dict[str, Any], ...]
    """Fields without rate and source."""
    measure: Callable[[], Sequence[float]]
    """Returns a rate per row."""


class Profile:
    """A hardware file that grows by rows with one source."""

    def __init__(self, file: HardwareFile, path: Path, source: str) -> None:
        self.file = file
        self.path = path
        self.source = source

    def lacks(self, measurement: Measurement) -> bool:
        """Return True if a row is not in the file."""
        columns = list(measurement.rows[0])
        table = getattr(self.file, TABLES[measurement.row_type])
        known = {tuple(getattr(row, column) for column in columns) for row in table}
        return any(tuple(row.values()) not in known for row in measurement.rows)

    def add(self, measurement: Measurement, rates: Sequence[float]) -> None:
        """Add measured rows and write the file."""
        row_type: Any = measurement.row_type
        rows = tuple(
            row_type(**fields, rate=rate, source=self.source)
            for fields, rate in zip(measurement.rows, rates, strict=True)
        )
        table = TABLES[measurement.row_type]
        self.update(**{table: (*getattr(self.file, table), *rows)})

    def update(self, **fields: Any) -> None:
        """Replace fields and write the file."""
        self.file = replace(self.file, **fields)
        Hardware(self.file, str(self.path)).save(self.path)


def open_profile(
    path: Path, name: str | None, device: torch.device, per_node: int, mode: str
) -> Profile:
    """Open or create this machine's file; raise PlanError if it describes another machine."""
    properties = _describe_device(device, per_node)
    today = date.today().isoformat()
    key = f"{mode}-{today}"
    threads = properties.get("threads")
    backend = f"CUDA {torch.version.cuda}"
    if device.type != "cuda":
        backend = "CPU time of one thread" if threads == 1 else f"{threads} threads"
    text = f"`trainer profile` ({mode}), torch {torch.__version__}, {backend}"
    source = Source(kind="measured", date=today, text=text)
    reserved = Reserved(bytes=_measure_reserved(device), source=key)
    if not path.exists():
        file = HardwareFile(
            name=name or path.stem,
            devices_per_node=per_node,
            sources={key: source},
            device=Device(**properties, source=key),
            reserved=reserved,
        )
        return Profile(file, path, key)
    file = Hardware.load(path).file
    for label, actual, recorded in (
        ("device", properties["name"], file.device.name),
        ("number of devices on a node", per_node, file.devices_per_node),
        ("number of threads of a rank", threads, file.device.threads),
    ):
        if recorded not in (actual, None):
            raise PlanError(
                f"{path} describes another machine: its {label} is {recorded}, not {actual}",
                hint="give another --out, or the same --processes",
            )
    file = replace(
        file,
        sources={**file.sources, key: source},
        reserved=_max_reserved(reserved, file.reserved),
    )
    return Profile(file, path, key)


def measure_device(profile: Profile, sizes: ProfileSizes, clock: Clock) -> int:
    """Measure what one device computes; return the number of new measurements."""
    needs_launches = profile.file.overhead is None and clock.device.type == "cpu"
    if needs_launches:  # a GPU computes while its host launches the next operations
        operation = measure_launch_seconds(clock)
        profile.update(overhead=Overhead(operation=operation, step=0.0, source=profile.source))
    measurements = [m for m in enumerate_measurements(sizes, clock) if profile.lacks(m)]
    with Progress("profiling", total=len(measurements)) as progress:
        for measurement in measurements:
            try:
                profile.add(measurement, measurement.measure())
            except torch.OutOfMemoryError:
                table = TABLES[measurement.row_type]
                logger.warning("skipped, out of memory: %s %s", table, measurement.rows[0])
            progress.advance()
    return len(measurements) + needs_launches


def enumerate_measurements(sizes: ProfileSizes, clock: Clock) -> Iterator[Measurement]:
    """Yield all measurements on one device."""
    for size in sizes.copies:
        measure = partial(_measure_once, kernels.measure_copy, size, clock)
        yield Measurement(MemoryRate, ({"bytes": size},), measure)
    shapes = [(m, k, n, 1) for m in sizes.sides for k in sizes.sides for n in sizes.sides]
    side = sizes.sides[-2]
    shapes += [(m, side, side, EXPERTS) for m in sizes.sides[:-1]]
    for m, k, n, groups in shapes:
        fields: dict[str, Any] = {"m": m, "k": k, "n": n, "groups": groups}
        fields["precision"] = sizes.precision
        measure = partial(
            _measure_once,
            *(kernels.measure_matmul, m, k, n, groups, sizes.precision, clock),
        )
        yield Measurement(MatmulRate, (fields,), measure)
    for length in sizes.lengths:
        rows = max(sizes.tokens // length, 1)
        for width in sizes.head_widths:
            fields = {"head_width": width, "heads": sizes.heads, "length": length}
            fields["precision"] = sizes.precision
            yield Measurement(
                AttentionRate,
                _add_directions(fields),
                partial(
                    kernels.measure_attention,
                    *(sizes.heads, width, length, rows, sizes.precision, clock),
                ),
            )
        for width in sizes.widths:
            draw = kernels.RandomInputs(rows, length, width, sizes.precision, clock.device)
            for kernel in kernels.KERNELS:
                for size in kernels.list_sizes(kernel, length, sizes.vocabularies):
                    fields = {"width": width, "length": length, "size": size}
                    fields |= {"kernel": kernel, "precision": sizes.precision}
                    measure_kernel = partial(kernels.measure_kernel, kernel, draw, size, clock)
                    yield Measurement(KernelRate, _add_directions(fields), measure_kernel)


def measure_links(profile: Profile | None, world: World, sizes: ProfileSizes, clock: Clock) -> None:
    """Measure collectives and overlap; rank 0 has the profile and writes it."""
    largest_shapes = {shape.link: shape for shape in world.shapes()}
    for shape in world.shapes():
        with open_group(world, shape) as group:
            _measure_collectives(profile, world, group, sizes, clock)
            if shape == largest_shapes[shape.link]:
                _measure_overlap(profile, world, group, sizes, clock)
    if profile is not None:  # with the buffers of all collectives
        reserved = Reserved(bytes=_measure_reserved(world.device), source=profile.source)
        profile.update(reserved=_max_reserved(reserved, profile.file.reserved))


def _measure_collectives(
    profile: Profile | None, world: World, group: RankGroup, sizes: ProfileSizes, clock: Clock
) -> None:
    shape = group.shape
    for collective in select_collectives(()):
        if collective == "p2p" and shape.ranks > 2:
            continue
        rounded = (round_size(collective, size, shape.ranks) for size in sizes.messages)
        missing_sizes = _broadcast(
            [
                size
                for size in rounded
                if profile is not None and profile.lacks(_collective_row(collective, shape, size))
            ]
        )
        for time in sweep(world, group, collective, missing_sizes, clock):
            if profile is not None:
                profile.add(_collective_row(collective, shape, time.bytes), (time.busbw,))


def _measure_overlap(
    profile: Profile | None, world: World, group: RankGroup, sizes: ProfileSizes, clock: Clock
) -> None:
    link = group.shape.link
    if not _broadcast(profile is not None and link not in profile.file.overlap):
        return
    size, side = sizes.messages[-1], sizes.sides[-1]
    slowdowns = TURNS_SLOWDOWNS
    if not clock.counts_cpu:
        slowdowns = overlap.measure_slowdowns(world, group, size, side, sizes.precision, clock)
    if profile is not None:
        row = Overlap(compute=slowdowns[0], communication=slowdowns[1], source=profile.source)
        profile.update(overlap={**profile.file.overlap, link: row})


def _collective_row(collective: str, shape: GroupShape, size: int) -> Measurement:
    ranks = {"ranks": shape.ranks, "per_node": shape.per_node}
    fields = {"collective": collective, **ranks, "bytes": size}
    return Measurement(CollectiveRate, (fields,), tuple)


def _broadcast(value: Any) -> Any:
    """Return rank 0's value on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _add_directions(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple(fields | {"direction": direction} for direction in ("forward", "backward"))


def _measure_once(measure: Callable[..., float], *arguments: Any) -> tuple[float]:
    return (measure(*arguments),)


def _describe_device(device: torch.device, per_node: int) -> dict[str, Any]:
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    if kind == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return {"name": torch.cuda.get_device_name(device), "kind": kind, "memory": total}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory, threads = total // per_node, torch.get_num_threads()
    return {"name": _cpu_name(), "kind": kind, "memory": memory, "threads": threads}


def _cpu_name() -> str:
    """Return the processor's name, if the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _max_reserved(first: Reserved, second: Reserved) -> Reserved:
    return max(first, second, key=lambda reserved: reserved.bytes)


def _measure_reserved(device: torch.device) -> int:
    """Return the bytes in use on a device without torch's tensors."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    return peak_memory("cpu")
