"""Fit a device's figures to published runs, and predict runs from the figures of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.planner.hardware import Hardware
from headrace.planner.hardware.file import Attained

from ._published_layouts import Figures, PublishedLayout
from ._published_runs import Run

Numbers = NDArray[np.float64]

FIGURES: Mapping[str, Sequence[str]] = {
    "A100": ("product", "traffic", "node"),
    "H100": ("product", "fp8", "traffic", "doubling", "exposed"),
    "Blackwell": ("product", "fp8", "traffic"),
}
"""Fitted figures by family of devices: those on which its runs depend."""
FIRST = {"A100": "a100-80", "H100": "h100", "Blackwell": "b200"}
"""Hardware file from whose figures the fit begins."""
TRAFFIC = {"A100": 1.5, "H100": 2.4, "Blackwell": 2.2}
"""Fitted traffic of the programs, from which the fit begins."""
PUBLISHED: Mapping[str, Sequence[str]] = {
    "A100": ("fp8", "doubling"),
    "H100": ("fp8", "doubling"),
    "Blackwell": ("product", "fp8"),
}
"""Figures whose rates were published at many shapes: little evidence moves them little from 1."""
PRIOR, FREE = 5.0, 0.05
"""Weights of a squared logarithm: of such figures, and of the change of others."""
STEP = 0.05
"""Change of a figure's logarithm that shows how seconds depend on it."""
REACH = 0.4
"""Largest change of a logarithm in a turn."""
NEAR = 0.02
"""Errors below this are equally good."""


@dataclass(frozen=True)
class Prediction:
    """A run, predicted from others."""

    run: Run
    error: float
    constant: float
    """Error of a constant rate."""


class Fit:
    """Fits the figures of a family of devices by the sum of absolute logarithmic errors.

    Around the shipped figures a step's logarithm is linear in those of the figures.
    """

    def __init__(self, family: str, runs: Sequence[Run]) -> None:
        self.family = family
        self.runs = [run for run in runs if run.family == family]
        self.names = FIGURES[family]
        file = Hardware.load(FIRST[family]).file
        attained = file.attained or Attained(source=file.device.source)
        self.start = Figures(attained, TRAFFIC[family])
        self.layouts = {run: PublishedLayout(run, self.start) for run in self.runs}

    def move(self, figures: Figures, change: Numbers) -> Figures:
        """Return the figures with their logarithms changed."""
        factors = {name: math.exp(part) for name, part in zip(self.names, change, strict=True)}
        traffic = figures.traffic * factors.pop("traffic")
        values = {name: getattr(figures.attained, name) * f for name, f in factors.items()}
        return Figures(replace(figures.attained, **values), traffic)

    def log_error(self, run: Run, figures: Figures) -> float:
        return math.log(self.layouts[run].step(figures) / run.seconds)

    def log_errors(self, figures: Figures) -> Numbers:
        return np.array([self.log_error(run, figures) for run in self.runs])

    @cached_property
    def errors(self) -> Numbers:
        """Logarithmic errors with the shipped figures."""
        return self.log_errors(self.start)

    @cached_property
    def slopes(self) -> Numbers:
        """[runs, figures]: how the errors change with the figures' logarithms."""
        return self.find_slopes(self.start, self.errors)

    def find_slopes(self, figures: Figures, errors: Numbers) -> Numbers:
        moved = [self.log_errors(self.move(figures, STEP * row)) for row in np.eye(len(self.names))]
        return np.stack([(item - errors) / STEP for item in moved], axis=1)

    def fit_to(self, known: Numbers) -> Figures:
        """Return the figures that fit these runs best."""
        values = [getattr(self.start.attained, name, 1.0) for name in self.names]
        held = np.array([name in PUBLISHED[self.family] for name in self.names])
        away, weights = np.where(held, np.log(values), 0.0), np.where(held, PRIOR, FREE)
        change = solve(self.slopes[known], self.errors[known], away, weights)
        return self.move(self.start, change)

    @cached_property
    def fitted(self) -> Mapping[str, float]:
        """The figures that fit all runs best, by name."""
        figures = self.fit_to(np.ones(len(self.runs), dtype=bool))
        return {
            name: figures.traffic if name == "traffic" else getattr(figures.attained, name)
            for name in self.names
        }

    def predict(self, is_known: Callable[[Run, Run], bool]) -> list[Prediction]:
        """Predict each run from those that it knows; leave out a run that knows too few."""
        predictions = []
        for run in self.runs:
            known = np.array([is_known(run, item) for item in self.runs])
            if known.sum() < len(self.names):
                continue
            figures = self.fit_to(known)
            known_runs = [
                known_run
                for known_run, is_known_run in zip(self.runs, known, strict=True)
                if is_known_run
            ]
            predictions.append(
                Prediction(
                    run,
                    math.exp(self.log_error(run, figures)) - 1,
                    constant_error(run, known_runs),
                )
            )
        return predictions


def solve(slopes: Numbers, errors: Numbers, away: Numbers, weights: Numbers) -> Numbers:
    """Return the change of the figures that leaves the smallest absolute errors: least squares,
    weighted again and again by the errors' reciprocals. `away` is how far figures are from where
    `weights` hold them."""
    change = np.zeros(slopes.shape[1])
    for _ in range(30):
        by_error = 1 / np.maximum(np.abs(errors + slopes @ change), NEAR)
        matrix = slopes.T @ (slopes * by_error[:, None]) + np.diag(weights)
        change = np.linalg.solve(matrix, -slopes.T @ (by_error * errors) - weights * away)
    return np.clip(change, -REACH, REACH)


def constant_error(run: Run, known_runs: Sequence[Run]) -> float:
    """Return the error of a run with the rate of operations that fits the others best: their
    median, for runs in bf16 and in FP8 each."""

    def rate(published: Run) -> float:
        return (
            published.hardware_flops * published.tokens / published.seconds / published.get("world")
        )

    alike = [item for item in known_runs if item.get("fp8", False) == run.get("fp8", False)]
    return rate(run) / float(np.median([rate(item) for item in alike or known_runs])) - 1
