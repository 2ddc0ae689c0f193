"""Correction of a hardware file that fits measured steps of layout plans best.

A predicted step is a sum: seconds by table of rates, launches, and the overhead of a step. The
correction has a factor for every table, seconds for a launch, and seconds of overhead by engine.

Ranks share a processor's cores and caches, but a profile runs alone: together they compute slower
by about the same factor, the median ratio of measured to predicted seconds. Deviating from it has
a small cost, so figures that no trial shows get this factor. Collectives are measured with all
ranks: their expected factor is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ..hardware import Hardware
from ..hardware.file import HardwareFile, Overhead, Source
from ..prices.machine import RING

TABLES = ("matmul", "memory", "attention", "kernels", "collectives")
"""Tables of rates that get a factor. Links share the collectives' factor, and ring attention, a row
among kernels, that of attention."""
MIN_FACTOR, MAX_FACTOR = 1 / 8, 8.0
STIFFNESS = 1e-2
"""Cost of a factor of 2, added to the squares of relative errors."""
STEP = 0.1
"""Overhead that costs as much as a factor of 2, in typical steps."""
ROUNDS = 2000
MIN_CHANGE = 0.01
"""Smallest change that corrects a table."""
PROBE = 0.5
"""Factor on a table that shows its seconds in a step."""
LAUNCH = 1e-6
"""Seconds for an operation that show the number of launches."""


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step, and how to predict it."""

    price: Callable[[Hardware], float]
    """Returns the predicted seconds with a hardware's figures."""
    seconds: float
    engine: str


@dataclass(frozen=True)
class Correction:
    factors: Mapping[str, float]
    """Corrected seconds by table, in multiples of the file's."""
    operation: float
    """Seconds of a launch."""
    steps: Mapping[str, float]
    """Seconds of overhead in a step by engine; the first measured engine comes first."""

    def words(self) -> list[str]:
        """Return the changes in words."""
        words = [
            f"{name} × {1 / factor:.3g}"
            for name, factor in self.factors.items()
            if abs(factor - 1) > MIN_CHANGE
        ]
        words += [f"{self.operation * 1e6:.3g} µs an operation"] * (self.operation > 0)
        return words + [
            f"{seconds * 1e3:.3g} ms a step of {engine}"
            for engine, seconds in self.steps.items()
            if seconds > 0
        ]


def fit_correction(steps: Sequence[MeasuredStep], hardware: Hardware) -> Correction:
    """Return the correction that brings predictions closest to the measured steps."""
    plain = Hardware(replace(hardware.file, overhead=None), hardware.where)
    known = hardware.file.overhead or Overhead(operation=0.0, step=0.0, source="")
    engines = list(dict.fromkeys(step.engine for step in steps))
    common = median(step.seconds / step.price(hardware) for step in steps)
    common = min(max(common, MIN_FACTOR), MAX_FACTOR)
    start = [1.0 if name == "collectives" else common for name in TABLES]
    start += [common * known.operation, *map(known.step_seconds, engines)]
    rows = [
        [*_seconds_by_table(step, plain), *(float(step.engine == engine) for engine in engines)]
        for step in steps
    ]
    typical = sum(step.seconds for step in steps) / len(steps)
    launches = sum(row[len(TABLES)] for row in rows) / len(rows)
    # A deviation counts in factors of a table, or in typical steps.
    launch = typical / max(launches, 1.0)
    units = [*[1.0] * len(TABLES), launch, *[STEP * typical] * len(engines)]
    limits = [
        *[(MIN_FACTOR, MAX_FACTOR)] * len(TABLES),
        (0.0, launch),
        *[(0.0, typical)] * len(engines),
    ]
    values = list(start)
    scaled = [[term / step.seconds for term in row] for row, step in zip(rows, steps, strict=True)]
    for _ in range(ROUNDS):  # one unknown after another: the cost is convex
        for k, unit in enumerate(units):
            cost = STIFFNESS / unit**2
            slope, weight = cost * start[k], cost
            for row in scaled:
                residual = 1 - sum(v * term for v, term in zip(values, row, strict=True))
                slope += row[k] * (residual + values[k] * row[k])
                weight += row[k] ** 2
            values[k] = min(max(slope / weight, limits[k][0]), limits[k][1])
    factors, [operation, *overheads] = values[: len(TABLES)], values[len(TABLES) :]
    return Correction(
        factors=dict(zip(TABLES, factors, strict=True)),
        operation=operation,
        steps=dict(zip(engines, overheads, strict=True)),
    )


def _seconds_by_table(step: MeasuredStep, plain: Hardware) -> list[float]:
    """Return a step's seconds by table, then its number of launches."""
    total = step.price(plain)
    seconds = []
    for name in TABLES:
        tables = _scale_tables(plain.file, {name: PROBE})
        faster = step.price(_change_unchecked(plain, **tables))
        seconds.append((total - faster) / (1 - PROBE))
    overhead = Overhead(operation=LAUNCH, step=0.0, source="")
    with_launches = step.price(_change_unchecked(plain, overhead=overhead))
    return [*seconds, (with_launches - total) / LAUNCH]


def _change_unchecked(hardware: Hardware, **changes: Any) -> Hardware:
    """Change a hardware's file without checks: it is priced with, never written."""
    file = object.__new__(HardwareFile)
    file.__dict__.update(vars(hardware.file) | changes)
    return Hardware(file, hardware.where)


def _scale_tables(
    file: HardwareFile,
    factors: Mapping[str, float],
    rename_source: Callable[[str, str], str] | None = None,
) -> dict[str, Any]:
    """Return tables whose seconds are multiplied by `factors`.

    `rename_source(table, source)` names the changed rows' source.
    """

    def change(table: str, row: Any, **changes: float) -> Any:
        source = {} if rename_source is None else {"source": rename_source(table, row.source)}
        return replace(row, **changes, **source)

    def scale(table: str, row: Any) -> Any:
        table = "attention" if getattr(row, "kernel", None) == RING else table
        factor = factors.get(table)
        return row if factor is None else change(table, row, rate=row.rate / factor)

    tables: dict[str, Any] = {
        name: tuple(scale(name, row) for row in getattr(file, name)) for name in TABLES
    }
    if (factor := factors.get("collectives")) is not None:
        tables["links"] = {
            name: change(
                "collectives",
                link,
                bandwidth=link.bandwidth / factor,
                latency=link.latency * factor,
            )
            for name, link in file.links.items()
        }
    return tables


def apply_correction(
    hardware: Hardware, correction: Correction, date: str, about: str
) -> HardwareFile:
    """Return the file with corrected rates, whose sources say what changed.

    `about` names the measurement.
    """
    file = hardware.file
    changed = {
        name: factor for name, factor in correction.factors.items() if abs(factor - 1) > MIN_CHANGE
    }
    sources = dict(file.sources)

    def rename_source(table: str, old: str) -> str:
        name = f"{old}-{table}-{date}"
        text = f"{file.sources[old].text}; rates × {1 / changed[table]:.4g} by {about}"
        sources[name] = Source(kind="measured", date=date, text=text)
        return name

    tables = _scale_tables(file, changed, rename_source)
    overhead = file.overhead
    if correction.operation or any(correction.steps.values()):
        name = f"tune-{date}"
        sources[name] = Source(kind="measured", date=date, text=about)
        [(_, first), *later] = correction.steps.items()
        overhead = Overhead(
            operation=correction.operation, step=first, engines=dict(later), source=name
        )
    used = {row.source for _, row in replace(file, **tables, sources=sources).rows()}
    used |= {overhead.source} if overhead is not None else set()
    sources = {name: source for name, source in sources.items() if name in used}
    return replace(file, **tables, overhead=overhead, sources=sources)
