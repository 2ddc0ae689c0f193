"""Regression of scores on shares: a Gaussian process, which says how sure it is.

score(x) = mean + slopes · x + a smooth function of √x + noise

Between square roots a step from 1% to 2% is as long as one from 10% to about 12.5%, as small shares
change a score most. The scales of the slopes, of the smooth function and of the noise, and its
length, are those under which the measured scores are most likely.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from ...dataplane.arrays import Float64

LENGTHS = (0.15, 0.3, 0.6, 1.2)
"""Distances between √x over which the smooth function changes."""
SMOOTH = (0.1, 0.3, 1.0, 3.0)
SLOPES = (0.3, 1.0, 3.0, 10.0)
NOISE = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Scales that are tried, in standard deviations of the scores."""


@dataclass(frozen=True)
class Scales:
    slopes: float
    smooth: float
    length: float
    noise: float


class Regression:
    """A fit of scores [n] on shares [n, sources]."""

    def __init__(self, shares: Float64, scores: Float64, least_noise: float = 0.0) -> None:
        """`least_noise` is the standard error of a score, known from seeds."""
        self.shares = shares
        self.mean = float(scores.mean())
        self.unit = float(scores.std()) or 1.0
        self.targets = (scores - self.mean) / self.unit
        floor = least_noise / self.unit
        tried = (
            Scales(*scales)
            for scales in itertools.product(SLOPES, SMOOTH, LENGTHS, NOISE)
            if scales[-1] >= floor or scales[-1] == NOISE[-1]
        )
        self.scales = max(tried, key=self._log_likelihood)
        self._fit()

    def _fit(self) -> None:
        covariance = self._noisy(self.scales)
        self._lower = np.linalg.cholesky(covariance)
        self._weights = self._solve(self.targets)

    def _noisy(self, scales: Scales) -> Float64:
        noise = scales.noise**2 * np.eye(len(self.shares))
        return kernel(self.shares, self.shares, scales) + noise

    def _solve(self, values: Float64) -> Float64:
        return np.asarray(np.linalg.solve(self._lower.T, np.linalg.solve(self._lower, values)))

    def _log_likelihood(self, scales: Scales) -> float:
        lower = np.linalg.cholesky(self._noisy(scales))
        half = np.linalg.solve(lower, self.targets)
        return float(-0.5 * half @ half - np.log(np.diag(lower)).sum())

    def predict(self, shares: Float64) -> tuple[Float64, Float64]:
        """Return the predicted scores, and the standard deviations of their errors, noise left
        out."""
        cross = kernel(shares, self.shares, self.scales)
        half = np.linalg.solve(self._lower, cross.T)
        own = kernel_of_each(shares, self.scales)
        variance = np.maximum(own - (half**2).sum(0), 0.0)
        return self.mean + self.unit * (cross @ self._weights), self.unit * np.sqrt(variance)

    def difference(self, there: Float64, here: Float64) -> tuple[float, float]:
        """Return the predicted difference of the scores of two mixtures, and the standard deviation
        of its error."""
        both = np.stack([there, here])
        sign = np.array([1.0, -1.0])
        cross = kernel(both, self.shares, self.scales)
        half = np.linalg.solve(self._lower, cross.T)
        covariance = kernel(both, both, self.scales) - half.T @ half
        variance = max(float(sign @ covariance @ sign), 0.0)
        return self.unit * float(sign @ cross @ self._weights), self.unit * math.sqrt(variance)

    def left_out(self) -> Float64:
        """Return the prediction of each score by a fit of the others, with the same scales."""
        inverse = np.linalg.inv(self._noisy(self.scales))
        errors = (inverse @ self.targets) / np.diag(inverse)
        return np.asarray(self.mean + self.unit * (self.targets - errors))

    def believing(self, shares: Float64) -> Regression:
        """Return the regression as if its own prediction for one more mixture had been measured."""
        predicted, _ = self.predict(shares[None])
        more = object.__new__(Regression)
        more.mean, more.unit, more.scales = self.mean, self.unit, self.scales
        more.shares = np.vstack([self.shares, shares])
        more.targets = np.append(self.targets, (predicted - self.mean) / self.unit)
        more._fit()
        return more


def kernel(one: Float64, other: Float64, scales: Scales) -> Float64:
    """Return the covariances of the scores of two lists of mixtures."""
    apart = np.sqrt(one)[:, None, :] - np.sqrt(other)[None, :, :]
    distance = (apart**2).sum(-1) / scales.length**2
    slopes = scales.slopes**2 * (one @ other.T)
    return np.asarray(slopes + scales.smooth**2 * np.exp(-distance / 2))


def kernel_of_each(shares: Float64, scales: Scales) -> Float64:
    """Return the variance of each mixture's score."""
    return np.asarray(scales.slopes**2 * (shares**2).sum(-1) + scales.smooth**2)
