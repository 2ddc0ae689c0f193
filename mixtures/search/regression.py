"""Regress scores on shares by a Gaussian process, which also predicts its errors.

score(x) = mean + slopes · x + smooth(√x) + noise

In square roots, a step from 1% to 2% is as long as a step from 10% to about 12.5%, because small
shares change a score most. The scales for slopes, smooth function and noise, and the function's
length, maximize the likelihood of the measured scores.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from ...dataplane.arrays import Float64

LENGTH_SCALES = (0.15, 0.3, 0.6, 1.2)
"""Distances between √x over which the smooth function changes."""
SMOOTH_SCALES = (0.1, 0.3, 1.0, 3.0)
SLOPE_SCALES = (0.3, 1.0, 3.0, 10.0)
NOISE_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Candidate scales, in standard deviations of the scores."""


@dataclass(frozen=True)
class Hyperparameters:
    """Scales in the kernel and the noise."""

    slopes: float
    smooth: float
    length: float
    noise: float


class Regression:
    """A fit of scores [n] on shares [n, sources]."""

    def __init__(self, shares: Float64, scores: Float64, min_noise: float = 0.0) -> None:
        """Fit the scores. `min_noise` is a score's standard error, known from seeds."""
        self.shares = shares
        self.mean = float(scores.mean())
        self.unit = float(scores.std()) or 1.0
        self.targets = (scores - self.mean) / self.unit
        floor = min_noise / self.unit
        candidates = (
            Hyperparameters(slopes, smooth, length, noise)
            for slopes, smooth, length, noise in itertools.product(
                SLOPE_SCALES, SMOOTH_SCALES, LENGTH_SCALES, NOISE_SCALES
            )
            if noise >= floor or noise == NOISE_SCALES[-1]
        )
        self.hyperparameters = max(candidates, key=self._log_likelihood)
        self._fit()

    def _fit(self) -> None:
        covariance = self._noisy_covariance(self.hyperparameters)
        self._lower = np.linalg.cholesky(covariance)
        self._weights = self._solve(self.targets)

    def _noisy_covariance(self, hyperparameters: Hyperparameters) -> Float64:
        noise = hyperparameters.noise**2 * np.eye(len(self.shares))
        return kernel(self.shares, self.shares, hyperparameters) + noise

    def _solve(self, values: Float64) -> Float64:
        return np.asarray(np.linalg.solve(self._lower.T, np.linalg.solve(self._lower, values)))

    def _log_likelihood(self, hyperparameters: Hyperparameters) -> float:
        lower = np.linalg.cholesky(self._noisy_covariance(hyperparameters))
        half = np.linalg.solve(lower, self.targets)
        return float(-0.5 * half @ half - np.log(np.diag(lower)).sum())

    def predict(self, shares: Float64) -> tuple[Float64, Float64]:
        """Predict scores [m] at shares [m, sources], and standard deviations without noise."""
        cross = kernel(shares, self.shares, self.hyperparameters)
        half = np.linalg.solve(self._lower, cross.T)
        prior = prior_variances(shares, self.hyperparameters)
        variance = np.maximum(prior - (half**2).sum(0), 0.0)
        return self.mean + self.unit * (cross @ self._weights), self.unit * np.sqrt(variance)

    def predict_difference(self, shares: Float64, baseline: Float64) -> tuple[float, float]:
        """Predict the score at `shares` minus the score at `baseline`; also returns the standard
        deviation."""
        both = np.stack([shares, baseline])
        sign = np.array([1.0, -1.0])
        cross = kernel(both, self.shares, self.hyperparameters)
        half = np.linalg.solve(self._lower, cross.T)
        covariance = kernel(both, both, self.hyperparameters) - half.T @ half
        variance = max(float(sign @ covariance @ sign), 0.0)
        return self.unit * float(sign @ cross @ self._weights), self.unit * math.sqrt(variance)

    def predict_left_out(self) -> Float64:
        """Predict every score by a fit without it (leave-one-out), at equal hyperparameters."""
        inverse = np.linalg.inv(self._noisy_covariance(self.hyperparameters))
        errors = (inverse @ self.targets) / np.diag(inverse)
        return np.asarray(self.mean + self.unit * (self.targets - errors))

    def condition_on_prediction(self, shares: Float64) -> Regression:
        """Condition on the predicted score at `shares`, as if it had been measured."""
        predicted, _ = self.predict(shares[None])
        conditioned = object.__new__(Regression)
        conditioned.mean, conditioned.unit = self.mean, self.unit
        conditioned.hyperparameters = self.hyperparameters
        conditioned.shares = np.vstack([self.shares, shares])
        conditioned.targets = np.append(self.targets, (predicted - self.mean) / self.unit)
        conditioned._fit()
        return conditioned


def kernel(rows: Float64, columns: Float64, hyperparameters: Hyperparameters) -> Float64:
    """Compute the prior covariances [m, n] between scores of shares [m, sources], [n, sources]."""
    steps = np.sqrt(rows)[:, None, :] - np.sqrt(columns)[None, :, :]
    distance = (steps**2).sum(-1) / hyperparameters.length**2
    slopes = hyperparameters.slopes**2 * (rows @ columns.T)
    return np.asarray(slopes + hyperparameters.smooth**2 * np.exp(-distance / 2))


def prior_variances(shares: Float64, hyperparameters: Hyperparameters) -> Float64:
    """Compute the diagonal of `kernel(shares, shares)`."""
    return np.asarray(hyperparameters.slopes**2 * (shares**2).sum(-1) + hyperparameters.smooth**2)
