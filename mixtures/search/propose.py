"""Propose the mixtures to measure next, where the regression expects the most improvement.

Bayesian optimization on the simplex of shares: random search maximizes the expected improvement,
in rounds that narrow around the best mixtures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...dataplane.arrays import Float64
from .regression import Regression

NUM_SAMPLES = 4096
"""Random mixtures per round."""
NUM_ROUNDS = 6
"""Rounds per search; later rounds draw closer around the best mixtures."""
NUM_SURVIVORS = 32
"""Mixtures that a round passes on to the next."""
CONCENTRATION = 30.0
"""Sharpness of the first round around a mixture; it doubles in each round."""
SHARE_DIGITS = 3
"""Decimals of a proposed share."""
MIN_DISTANCE = 0.02
"""Minimum distance, in the share of some source, between a proposal and any mixture in the fit: two
nearer mixtures would train nearly the same model."""


@dataclass(frozen=True)
class Proposal:
    shares: Float64
    """[sources]."""
    score: float
    """Predicted."""
    error: float
    """Standard deviation of the prediction."""
    improvement_probability: float
    """Probability that the mixture is better than the best measured mixture."""


def propose(
    regression: Regression, best_score: float, count: int, max_shares: Float64, seed: int = 0
) -> list[Proposal]:
    """Return up to `count` mixtures to measure together, fewer if `max_shares` [sources] allows no
    more. Each maximizes the expected improvement on `best_score`.

    Later mixtures are chosen as if earlier ones had been measured with the predicted scores.
    """
    random = np.random.default_rng(seed)
    proposals: list[Proposal] = []
    conditioned, min_score = regression, best_score
    while len(proposals) < count:
        utility = partial(expected_improvement, min_score)
        shares = _maximize(random, conditioned, max_shares, utility, distinct=True)
        if shares is None:
            break
        proposals.append(_predict_proposal(regression, shares, best_score))
        conditioned = conditioned.condition_on_prediction(shares)
        min_score = min(min_score, proposals[-1].score)
    return proposals


def find_expected_best(
    regression: Regression, best_score: float, max_shares: Float64, seed: int = 0
) -> Proposal:
    """Find the mixture with the lowest predicted score."""
    random = np.random.default_rng(seed)
    shares = _maximize(random, regression, max_shares, lambda mean, _: -mean)
    assert shares is not None
    return _predict_proposal(regression, shares, best_score)


def _predict_proposal(regression: Regression, shares: Float64, best_score: float) -> Proposal:
    [mean], [error] = regression.predict(shares[None])
    probability = (
        float(mean < best_score) if not error else _normal_cdf((best_score - mean) / error)
    )
    return Proposal(shares, float(mean), float(error), probability)


def expected_improvement(best_score: float, mean: Float64, error: Float64) -> Float64:
    """Compute the expectation of max(best_score - score, 0)."""
    error = np.maximum(error, 1e-12)
    z = (best_score - mean) / error
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(error * (z * _normal_cdfs(z) + density))


def _maximize(
    random: np.random.Generator,
    regression: Regression,
    max_shares: Float64,
    utility: Callable[[Float64, Float64], Float64],
    *,
    distinct: bool = False,
) -> Float64 | None:
    """Search for the mixture that maximizes `utility(mean, error)` of its predicted score.

    A `distinct` mixture lies MIN_DISTANCE from all mixtures in the fit; None if there is none.
    """
    num_sources = len(max_shares)
    centres = np.vstack([regression.shares, np.full((1, num_sources), 1 / num_sources)])
    samples = [
        random.dirichlet(np.full(num_sources, alpha), NUM_SAMPLES // 4) for alpha in (0.3, 1.0, 3.0)
    ]
    samples.append(_sample_around(random, centres, CONCENTRATION, NUM_SAMPLES // 4))
    pool = np.vstack([*samples, regression.shares])
    for number in range(NUM_ROUNDS):
        pool = _round_shares(pool[(pool <= max_shares + 1e-9).all(1)])
        if not len(pool):  # narrow limits: from the limits themselves
            pool = _round_shares((max_shares / max_shares.sum())[None])
        if distinct:
            distances = np.abs(pool[:, None] - regression.shares[None]).max(-1).min(1)
            pool = pool[distances >= MIN_DISTANCE]
        if not len(pool):
            return None
        ranking = np.argsort(-utility(*regression.predict(pool)), kind="stable")
        pool = pool[ranking[:NUM_SURVIVORS]]
        if number < NUM_ROUNDS - 1:
            concentration = CONCENTRATION * 2**number
            pool = np.vstack([pool, _sample_around(random, pool, concentration, NUM_SAMPLES)])
    return np.asarray(pool[0])


def _sample_around(
    random: np.random.Generator, centres: Float64, concentration: float, count: int
) -> Float64:
    """Draw `count` mixtures from Dirichlet distributions around random centres."""
    means = centres[random.integers(0, len(centres), count)]
    gammas = random.standard_gamma(np.maximum(means * concentration, 1e-3))
    total = gammas.sum(1, keepdims=True)
    return np.asarray(np.where(total > 0, gammas / np.maximum(total, 1e-300), means))


def _round_shares(shares: Float64) -> Float64:
    """Round shares to SHARE_DIGITS; the largest takes the difference, so that the sum stays 1."""
    rounded = np.round(shares, SHARE_DIGITS)
    largest = rounded.argmax(1)
    rounded[np.arange(len(rounded)), largest] += 1 - rounded.sum(1)
    return np.round(rounded, SHARE_DIGITS)


def _normal_cdf(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


def _normal_cdfs(values: Float64) -> Float64:
    return np.array([_normal_cdf(value) for value in values], np.float64)


def estimate_effects(
    regression: Regression, shares: Float64, step: float = 0.01
) -> list[tuple[float, float]]:
    """Predict, by source, the change in score when the source's share grows by `step` and all
    other shares shrink in proportion; with its standard deviation."""
    effects = []
    for number, share in enumerate(shares):
        remainder = 1 - share
        growth = min(step, remainder)
        shifted = shares * ((remainder - growth) / remainder if remainder else 0.0)
        shifted[number] = share + growth
        effects.append(regression.predict_difference(shifted, shares))
    return effects
