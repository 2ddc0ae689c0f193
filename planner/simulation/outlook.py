"""A simulated plan as numbers: slow parts, failures, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...console.progress import format_duration
from .events import Events
from .failures import HOUR, Failures, best_interval, daly_interval, goodput, young_interval
from .slow import SLOW_PARTS, Slowdown
from .step import SimulatedStep, Simulation

FACTORS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
"""Factors on the curves of slow parts."""


@dataclass(frozen=True)
class PlanOutlook:
    """A phase's simulated plan, with slow parts and failures."""

    title: str
    simulation: Simulation
    slowdowns: Sequence[Slowdown]
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
        """Tokens in a step; rows, for foreign modules."""
        phase = self.simulation.costs.phase
        return phase.seq_len * phase.batch_rows

    @cached_property
    def slowed_steps(self) -> list[tuple[Slowdown, SimulatedStep]]:
        return [(slowdown, self.simulation.slow_down(slowdown)) for slowdown in self.slowdowns]

    @cached_property
    def curves(self) -> dict[str, list[float]]:
        """Seconds a step at each of FACTORS, by slow part in the busiest stage."""
        rank = self.simulation.busiest * self.simulation.stage_ranks
        return {
            meaning: [
                self.simulation.slow_down(Slowdown(component, rank, factor)).seconds
                for factor in FACTORS
            ]
            for component, meaning in SLOW_PARTS.items()
        }

    @property
    def mean_seconds(self) -> float:
        """Mean seconds between the job's failures."""
        return self.failures.mean_seconds(self.gpus)

    def goodput(self, every: int) -> float:
        return goodput(self.failures, self.mean_seconds, self.seconds, every)

    @cached_property
    def best_interval(self) -> int:
        """Steps between checkpoints with the highest goodput."""
        return best_interval(self.failures, self.mean_seconds, self.seconds)

    @property
    def formulas(self) -> dict[str, int]:
        """Steps between checkpoints by Young's and Daly's formulas."""
        intervals = {
            "Young": young_interval(self.failures, self.mean_seconds),
            "Daly": daly_interval(self.failures, self.mean_seconds),
        }
        return {name: max(1, round(seconds / self.seconds)) for name, seconds in intervals.items()}

    def lines(self) -> Iterator[str]:
        """Yield the result for a person."""
        for slowdown, step in self.slowed_steps:
            yield (
                f"slow {slowdown}: {step.seconds:.4g} s a step instead of {self.seconds:.4g} "
                f"({step.seconds / self.seconds - 1:+.1%}): {SLOW_PARTS[slowdown.part]} takes "
                f"{slowdown.factor:g} times as long, and all {self.gpus:,} ranks wait"
            )
        failures = self.failures
        yield (
            f"failures: one each {format_duration(self.mean_seconds)} "
            f"({failures.mtbf:,.0f} hours for one device), restart {failures.restart:g} s, "
            f"save {failures.save:g} s and {failures.write:g} s beside training"
        )
        for name, every in self.intervals().items():
            yield (
                f"    {name:<6} a checkpoint each {every:,} steps "
                f"({format_duration(every * self.seconds)}): {self.goodput(every):.2%} of the "
                "time trains"
            )

    def intervals(self) -> dict[str, int]:
        """Return steps between checkpoints: the best interval, by formulas, and as asked for."""
        every = self.failures.every
        return {
            "best": self.best_interval,
            **self.formulas,
            **({} if every is None else {"every": every}),
        }

    def dump(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "seconds": self.seconds,
            "slow": {str(slowdown): step.seconds for slowdown, step in self.slowed_steps},
            "hours_between_failures": self.mean_seconds / HOUR,
            "checkpoints": {
                name.lower(): {"steps": every, "goodput": self.goodput(every)}
                for name, every in self.intervals().items()
            },
        }
