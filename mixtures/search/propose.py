"""Propose the mixtures to measure next, where the regression expects the most improvement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...dataplane.arrays import Float64
from .regression import Regression

SAMPLES = 4096
"""Mixtures that are compared in each round of a search."""
ROUNDS = 6
"""Rounds, each closer around the best mixtures of the round before."""
KEPT = 32
CONCENTRATION = 30.0
"""Sharpness of the first round around a mixture; it doubles in each round."""
DIGITS = 3
"""Digits of a proposed share."""
APART = 0.02
"""Least difference, in the share of some source, between a proposal and any other mixture of the
fit: two nearer ones would train nearly the same model."""


@dataclass(frozen=True)
class Proposal:
    shares: Float64
    score: float
    """Predicted."""
    error: float
    """Standard deviation of the prediction."""
    better: float
    """Probability that it is better than the best measured mixture."""


def propose(
    fit: Regression, best: float, count: int, most: Float64, seed: int = 0
) -> list[Proposal]:
    """Return `count` mixtures to measure together, or fewer if the limits allow no more: each where
    the fit expects the most improvement on the score `best`. `most` are the largest shares of the
    sources.

    Later ones are chosen as if earlier ones had been measured with the predicted scores.
    """
    random = np.random.default_rng(seed)
    found: list[Proposal] = []
    believed, least = fit, best
    while len(found) < count:
        worth = partial(expected_improvement, least)
        shares = _best_of(random, believed, most, worth, new=True)
        if shares is None:
            break
        found.append(proposal(fit, shares, best))
        believed, least = believed.believing(shares), min(least, found[-1].score)
    return found


def expected_best(fit: Regression, best: float, most: Float64, seed: int = 0) -> Proposal:
    """Return the mixture with the lowest predicted score."""
    shares = _best_of(np.random.default_rng(seed), fit, most, lambda mean, _: -mean)
    assert shares is not None
    return proposal(fit, shares, best)


def proposal(fit: Regression, shares: Float64, best: float) -> Proposal:
    [mean], [error] = fit.predict(shares[None])
    better = float(mean < best) if not error else _normal((best - mean) / error)
    return Proposal(shares, float(mean), float(error), better)


def expected_improvement(best: float, mean: Float64, error: Float64) -> Float64:
    """Return how far below `best` scores are expected to be, where above counts as 0."""
    error = np.maximum(error, 1e-12)
    z = (best - mean) / error
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(error * (z * _normals(z) + density))


def _best_of(
    random: np.random.Generator,
    fit: Regression,
    most: Float64,
    worth: Callable[[Float64, Float64], Float64],
    *,
    new: bool = False,
) -> Float64 | None:
    """Return the mixture whose predicted score and its error have the greatest worth: random ones
    first, then ones around the best. A `new` one is apart from those that the fit has; there may
    be none."""
    centres = np.vstack([fit.shares, np.full((1, len(most)), 1 / len(most))])
    tried = [random.dirichlet(np.full(len(most), a), SAMPLES // 4) for a in (0.3, 1.0, 3.0)]
    tried.append(_around(random, centres, CONCENTRATION, SAMPLES // 4))
    pool = np.vstack([*tried, fit.shares])
    for number in range(ROUNDS):
        pool = _rounded(pool[(pool <= most + 1e-9).all(1)])
        if not len(pool):  # narrow limits: from the limits themselves
            pool = _rounded((most / most.sum())[None])
        if new:
            apart = np.abs(pool[:, None] - fit.shares[None]).max(-1).min(1)
            pool = pool[apart >= APART]
        if not len(pool):
            return None
        pool = pool[np.argsort(-worth(*fit.predict(pool)), kind="stable")[:KEPT]]
        if number < ROUNDS - 1:
            pool = np.vstack([pool, _around(random, pool, CONCENTRATION * 2**number, SAMPLES)])
    return np.asarray(pool[0])


def _around(
    random: np.random.Generator, centres: Float64, concentration: float, count: int
) -> Float64:
    chosen = centres[random.integers(0, len(centres), count)]
    drawn = random.standard_gamma(np.maximum(chosen * concentration, 1e-3))
    total = drawn.sum(1, keepdims=True)
    return np.asarray(np.where(total > 0, drawn / np.maximum(total, 1e-300), chosen))


def _rounded(shares: Float64) -> Float64:
    """Return shares with DIGITS digits, which sum to 1: the largest takes the difference."""
    found = np.round(shares, DIGITS)
    largest = found.argmax(1)
    found[np.arange(len(found)), largest] += 1 - found.sum(1)
    return np.round(found, DIGITS)


def _normal(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


def _normals(values: Float64) -> Float64:
    return np.array([_normal(value) for value in values], np.float64)


def effects(fit: Regression, shares: Float64, step: float = 0.01) -> list[tuple[float, float]]:
    """Return the predicted change of the score if a source's share grows by `step` and the others
    shrink in proportion, and the standard deviation of its error."""
    found = []
    for number, share in enumerate(shares):
        others = 1 - share
        more = min(step, others)
        moved = shares * ((others - more) / others if others else 0.0)
        moved[number] = share + more
        found.append(fit.difference(moved, shares))
    return found
