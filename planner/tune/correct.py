"""Correction of a hardware file by the measured steps of layout plans.

A predicted step is a sum of parts: the seconds of each table of rates, of launches, and of the rest
of a step. The correction is a factor for each table, the seconds of a launch, and those of the rest
of a step with each engine, which fit the measured steps best.

Ranks share a processor's cores and caches, and a profile runs alone: they slow down all that is
computed by about the same factor, the median of measured by predicted seconds. A deviation from it
has a small cost, so that figures that no trial shows get this factor. Collectives are measured with
all ranks: their factor is expected near 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ..hardware import Hardware
from ..hardware.file import HardwareFile, Overhead, Source

TABLES = ("matmul", "memory", "attention", "kernels", "collectives")
"""Tables of rates, each with one factor. Links belong to the collectives."""
LEAST, MOST = 1 / 8, 8.0
"""Limits of a factor."""
STIFFNESS = 1e-2
"""Cost of a factor of 2, beside the squares of relative errors."""
STEP = 0.1
"""Seconds outside the passes whose cost is that of a factor of 2, in typical steps."""
ROUNDS = 2000
VISIBLE = 0.01
"""Least change of a factor that is written."""
PROBE = 0.5
"""Factor by which a table is changed to find its part of a step."""
LAUNCH = 1e-6
"""Seconds of an operation by which the number of launches is found."""


@dataclass(frozen=True)
class Step:
    """A measured step."""

    price: Callable[[Hardware], float]
    """Return its predicted seconds."""
    seconds: float
    engine: str


@dataclass(frozen=True)
class Correction:
    factors: Mapping[str, float]
    """Seconds of each table, in those of the file."""
    operation: float
    steps: Mapping[str, float]
    """Seconds of the rest of a step, by engine; that of the first measured step comes first."""

    def words(self) -> list[str]:
        """Return the changes in words."""
        found = [
            f"{name} × {1 / factor:.3g}"
            for name, factor in self.factors.items()
            if abs(factor - 1) > VISIBLE
        ]
        found += [f"{self.operation * 1e6:.3g} µs an operation"] * (self.operation > 0)
        return found + [
            f"{seconds * 1e3:.3g} ms a step of {engine}"
            for engine, seconds in self.steps.items()
            if seconds > 0
        ]


def fit(steps: Sequence[Step], hardware: Hardware) -> Correction:
    """Return the correction with which the predictions fit the measured steps best."""
    plain = Hardware(replace(hardware.file, overhead=None), hardware.where)
    known = hardware.file.overhead or Overhead(operation=0.0, step=0.0, source="")
    engines = list(dict.fromkeys(step.engine for step in steps))
    common = median(step.seconds / step.price(hardware) for step in steps)
    common = min(max(common, LEAST), MOST)
    start = [1.0 if name == "collectives" else common for name in TABLES]
    start += [common * known.operation, *map(known.step_seconds, engines)]
    rows = [
        [*_parts(step, plain), *(float(step.engine == engine) for engine in engines)]
        for step in steps
    ]
    typical = sum(step.seconds for step in steps) / len(steps)
    launches = sum(row[len(TABLES)] for row in rows) / len(rows)
    # A deviation counts in factors of a table, or in typical steps.
    launch = typical / max(launches, 1.0)
    units = [*[1.0] * len(TABLES), launch, *[STEP * typical] * len(engines)]
    limits = [*[(LEAST, MOST)] * len(TABLES), (0.0, launch), *[(0.0, typical)] * len(engines)]
    values = list(start)
    scaled = [[part / step.seconds for part in row] for row, step in zip(rows, steps, strict=True)]
    for _ in range(ROUNDS):  # one unknown after the other: the sum is convex
        for k, unit in enumerate(units):
            cost = STIFFNESS / unit**2
            slope, weight = cost * start[k], cost
            for row in scaled:
                rest = 1 - sum(v * part for v, part in zip(values, row, strict=True))
                slope += row[k] * (rest + values[k] * row[k])
                weight += row[k] ** 2
            values[k] = min(max(slope / weight, limits[k][0]), limits[k][1])
    factors, [operation, *each] = values[: len(TABLES)], values[len(TABLES) :]
    return Correction(
        dict(zip(TABLES, factors, strict=True)), operation, dict(zip(engines, each, strict=True))
    )


def _parts(step: Step, plain: Hardware) -> list[float]:
    """Return the seconds of each table in a step, and its launches."""
    whole = step.price(plain)
    faster = [step.price(_with(plain, {name: PROBE})) for name in TABLES]
    with_launches = Overhead(operation=LAUNCH, step=0.0, source="")
    launched = step.price(Hardware(_unchecked(plain.file, overhead=with_launches), plain.where))
    parts = [(whole - less) / (1 - PROBE) for less in faster]
    return [*parts, (launched - whole) / LAUNCH]


def _with(hardware: Hardware, factors: Mapping[str, float]) -> Hardware:
    return Hardware(_unchecked(hardware.file, **_scaled(hardware.file, factors)), hardware.where)


def _unchecked(file: HardwareFile, **changes: Any) -> HardwareFile:
    """Return a changed file without checks: it is priced with, and never written."""
    made = object.__new__(HardwareFile)
    made.__dict__.update(vars(file) | changes)
    return made


def _scaled(
    file: HardwareFile,
    factors: Mapping[str, float],
    source: Callable[[str, str], str] | None = None,
) -> dict[str, Any]:
    """Return the tables with other rates; `source` names the source of a table's row."""

    def row(table: str, each: Any, **changes: float) -> Any:
        named = {} if source is None else {"source": source(table, each.source)}
        return replace(each, **changes, **named)

    found: dict[str, Any] = {
        name: tuple(row(name, each, rate=each.rate / factor) for each in getattr(file, name))
        for name, factor in factors.items()
    }
    if (factor := factors.get("collectives")) is not None:
        found["links"] = {
            name: row(
                "collectives",
                link,
                bandwidth=link.bandwidth / factor,
                latency=link.latency * factor,
            )
            for name, link in file.links.items()
        }
    return found


def corrected(hardware: Hardware, correction: Correction, date: str, about: str) -> HardwareFile:
    """Return the file with corrected rates. Their sources say what changed; `about` names the
    measurement."""
    file = hardware.file
    changed = {
        name: factor for name, factor in correction.factors.items() if abs(factor - 1) > VISIBLE
    }
    sources = dict(file.sources)

    def source(table: str, old: str) -> str:
        name = f"{old}-{table}-{date}"
        text = f"{file.sources[old].text}; rates × {1 / changed[table]:.4g} by {about}"
        sources[name] = Source(kind="measured", date=date, text=text)
        return name

    tables = _scaled(file, changed, source)
    overhead = file.overhead
    if correction.operation or any(correction.steps.values()):
        name = f"tune-{date}"
        sources[name] = Source(kind="measured", date=date, text=about)
        [(_, first), *others] = correction.steps.items()
        overhead = Overhead(
            operation=correction.operation, step=first, engines=dict(others), source=name
        )
    used = {row.source for _, row in replace(file, **tables, sources=sources).rows()}
    used |= {overhead.source} if overhead is not None else set()
    kept = {name: each for name, each in sources.items() if name in used}
    return replace(file, **tables, overhead=overhead, sources=kept)
