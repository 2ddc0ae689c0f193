"""Simulation of a plan as numbers: slow parts, failures, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...console.progress import format_duration
from .events import Events
from .failures import HOUR, Failures, best_interval, daly, goodput, young
from .slow import PARTS, Slow
from .step import Simulation, Step

FACTORS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
"""Factors of the curves of slow parts."""


@dataclass(frozen=True)
class Outlook:
    """Simulation of the plan of a phase."""

    title: str
    simulation: Simulation
    slow: Sequence[Slow]
    failures: Failures

    @cached_property
    def events(self) -> Events:
        return Events(self.simulation)

    @property
    def seconds(self) -> float:
        return self.simulation.step.seconds

    @property
    def gpus(self) -> int:
        return self.simulation.stage_ranks * self.simulation.problem.stages

    @property
    def tokens(self) -> int:
        """Tokens of a step; rows, for modules that are not ours."""
        phase = self.simulation.costs.phase
        return phase.seq_len * phase.batch_rows

    @cached_property
    def slowed(self) -> list[tuple[Slow, Step]]:
        return [(slow, self.simulation.slowed(slow)) for slow in self.slow]

    @cached_property
    def curves(self) -> dict[str, list[float]]:
        """Seconds of a step at each of FACTORS, for a slow part in the busiest stage."""
        rank = self.simulation.busiest * self.simulation.stage_ranks
        return {
            meaning: [self.simulation.slowed(Slow(part, rank, f)).seconds for f in FACTORS]
            for part, meaning in PARTS.items()
        }

    @property
    def mean(self) -> float:
        """Mean seconds between two failures of the job."""
        return self.failures.mean(self.gpus)

    def goodput(self, every: int) -> float:
        return goodput(self.failures, self.mean, self.seconds, every)

    @cached_property
    def best(self) -> int:
        """Steps between two checkpoints with the highest goodput."""
        return best_interval(self.failures, self.mean, self.seconds)

    @property
    def formulas(self) -> dict[str, int]:
        """Steps between two checkpoints by the formulas of Young and Daly."""
        by = {"Young": young(self.failures, self.mean), "Daly": daly(self.failures, self.mean)}
        return {name: max(1, round(seconds / self.seconds)) for name, seconds in by.items()}

    def lines(self) -> Iterator[str]:
        """Yield the result for a person."""
        for slow, step in self.slowed:
            yield (
                f"slow {slow}: {step.seconds:.4g} s a step instead of {self.seconds:.4g} "
                f"({step.seconds / self.seconds - 1:+.1%}): {PARTS[slow.part]} takes "
                f"{slow.factor:g} times as long, and all {self.gpus:,} ranks wait"
            )
        known = self.failures
        yield (
            f"failures: one each {format_duration(self.mean)} ({known.mtbf:,.0f} hours for one "
            f"device), restart {known.restart:g} s, save {known.save:g} s and {known.write:g} s "
            "beside training"
        )
        steps = {"best": self.best, **self.formulas}
        if known.every is not None:
            steps["every"] = known.every
        for name, every in steps.items():
            yield (
                f"    {name:<6} a checkpoint each {every:,} steps "
                f"({format_duration(every * self.seconds)}): {self.goodput(every):.2%} of the "
                "time trains"
            )

    def as_json(self) -> dict[str, Any]:
        steps = {"best": self.best, **{k.lower(): v for k, v in self.formulas.items()}}
        if self.failures.every is not None:
            steps["every"] = self.failures.every
        return {
            "seconds": self.seconds,
            "slow": {str(slow): step.seconds for slow, step in self.slowed},
            "hours_between_failures": self.mean / HOUR,
            "checkpoints": {
                name: {"steps": every, "goodput": self.goodput(every)}
                for name, every in steps.items()
            },
        }
