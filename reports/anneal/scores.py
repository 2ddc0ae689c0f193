"""Rank candidates by held-out bits per byte, and tell differences from seed noise.

A run's score is its weighted mean bits per byte over the held-out sources; a candidate's score is
the mean over its seeds. The noise is a score's standard deviation among a candidate's seeds, pooled
over all candidates. Two candidates differ clearly if the difference between their scores exceeds
CLEAR_DEVIATIONS standard deviations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ...console.errors import MisuseError, RunError
from ...dataplane.order.plan import Plan
from ...dataplane.runlog import ledger
from ...dataplane.runlog import writer as lines
from ...mixtures.planning.shares import drawn_shares
from ...trainer.run.stored import read_run
from ..board.byte_sizes import bits_per_byte, bytes_per_token
from .folder import AnnealFolder, Entry
from .train import is_finished

CLEAR_DEVIATIONS = 2.0


@dataclass(frozen=True)
class ScoredRun:
    """A candidate's finished run."""

    seed: int
    folder: str
    plan: str
    ledger: str
    """The ledger's last hash."""
    by_source: Mapping[str, float]
    """Held-out bits per byte."""
    score: float


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate and its finished runs, one for each seed."""

    name: str
    shares: Mapping[str, float]
    """Share of the plan's tokens by source."""
    tokens: int
    runs: Sequence[ScoredRun]

    @property
    def score(self) -> float:
        return statistics.mean(run.score for run in self.runs)

    @property
    def by_source(self) -> dict[str, float]:
        return {
            name: statistics.mean(run.by_source[name] for run in self.runs)
            for name in self.runs[0].by_source
        }


@dataclass(frozen=True)
class Ranking:
    candidates: Sequence[ScoredCandidate]
    """The best first."""
    weights: Mapping[str, float]
    """Weight in a score by held-out source; they sum to 1."""
    noise: float | None
    """A score's standard deviation among seeds; None if every candidate has a single seed."""
    waiting: Sequence[str]
    """Runs that are not finished."""

    @property
    def best(self) -> ScoredCandidate:
        return self.candidates[0]

    def standard_error(self, candidate: ScoredCandidate) -> float | None:
        """Return the standard error for a candidate's score; None without noise."""
        return None if self.noise is None else self.noise / math.sqrt(len(candidate.runs))

    def is_clearly_worse(self, candidate: ScoredCandidate) -> bool | None:
        """Return whether a candidate is clearly worse than the best; None without noise."""
        if self.noise is None:
            return None
        variance_factor = 1 / len(candidate.runs) + 1 / len(self.best.runs)
        threshold = CLEAR_DEVIATIONS * self.noise * math.sqrt(variance_factor)
        return candidate.score - self.best.score > threshold

    def is_within_noise(self, candidate: ScoredCandidate) -> bool:
        """Return whether a candidate behind the best is not clearly worse."""
        return candidate is not self.best and self.is_clearly_worse(candidate) is False


def check_weights(weights: Mapping[str, float], held_out: Collection[str]) -> None:
    """Raise if `weights` names a source without held-out rows."""
    if unknown := [name for name in weights if name not in held_out]:
        raise MisuseError(
            f"--score names {', '.join(unknown)}, which no held-out dataset has",
            hint=f"the held-out sources are {', '.join(sorted(held_out))}",
        )


def rank(folder: AnnealFolder, entries: Sequence[Entry], weights: Mapping[str, float]) -> Ranking:
    """Rank the candidates by their finished runs. Without `weights` all sources count alike."""
    finished = [entry for entry in entries if is_finished(folder, entry)]
    if not finished:
        raise RunError(f"no run of {folder.root} is finished", hint="train them first")
    token_bytes = _bytes_per_token(folder, finished[0])
    total = sum(weights.values()) or float(len(token_bytes))
    normalized = {
        source: weights.get(source, 0.0 if weights else 1.0) / total for source in token_bytes
    }
    candidates = [
        _score_candidate(folder, list(runs), token_bytes, normalized)
        for _, runs in groupby(finished, key=lambda entry: entry.name)
    ]
    return Ranking(
        candidates=sorted(candidates, key=lambda candidate: candidate.score),
        weights=normalized,
        noise=_pooled_deviation(candidates),
        waiting=[f"{entry.name}, seed {entry.seed}" for entry in entries if entry not in finished],
    )


def _bytes_per_token(folder: AnnealFolder, entry: Entry) -> dict[str, float]:
    """Return the bytes per token by held-out source; all runs share the held-out datasets."""
    held_out = Plan.load(str(read_run(folder.run_folder(entry.number)).held_out))
    return bytes_per_token({source.name: source.url for source in held_out.sources})


def _score_candidate(
    folder: AnnealFolder,
    entries: Sequence[Entry],
    token_bytes: Mapping[str, float],
    weights: Mapping[str, float],
) -> ScoredCandidate:
    plan = Plan.load(str(folder.run_folder(entries[0].number).plan))
    runs = [_score_run(folder, entry, token_bytes, weights) for entry in entries]
    return ScoredCandidate(entries[0].name, token_shares(plan), entries[0].tokens, runs)


def token_shares(plan: Plan) -> dict[str, float]:
    """Return the share of the plan's tokens by source, over all phases."""
    num_tokens = plan.end_token - plan.first_token
    shares = [0.0] * len(plan.sources)
    for phase in plan.phases:
        for number, phase_share in enumerate(drawn_shares(phase)):
            shares[number] += float(phase_share) * phase.rows * phase.seq_len / num_tokens
    return {source.name: share for source, share in zip(plan.sources, shares, strict=True) if share}


def _score_run(
    folder: AnnealFolder,
    entry: Entry,
    token_bytes: Mapping[str, float],
    weights: Mapping[str, float],
) -> ScoredRun:
    run = folder.run_folder(entry.number)
    *_, evaluation = lines.read(run.evaluations)  # the end of a phase is evaluated
    end = ledger.read_last(run.ledger) if run.ledger.exists() else None
    by_source = {}
    for source, bytes_per_source_token in token_bytes.items():
        loss = evaluation["sources"][source]["loss"]
        by_source[source] = (
            math.inf if loss is None else bits_per_byte(loss, bytes_per_source_token)
        )
    return ScoredRun(
        seed=entry.seed,
        folder=str(run.root),
        plan=entry.plan,
        ledger=end.hash if end else ledger.NAME,
        by_source=by_source,
        score=sum(weights[source] * bits for source, bits in by_source.items() if weights[source]),
    )


def _pooled_deviation(candidates: Sequence[ScoredCandidate]) -> float | None:
    """Return the standard deviation among seeds, pooled over candidates; None if each candidate
    has a single seed."""
    groups = [[run.score for run in candidate.runs] for candidate in candidates]
    degrees_of_freedom = sum(len(scores) - 1 for scores in groups)
    if not degrees_of_freedom:
        return None
    squares = sum(
        (score - statistics.mean(scores)) ** 2
        for scores in groups
        if len(scores) > 1
        for score in scores
    )
    return math.sqrt(squares / degrees_of_freedom)


def ranking_json(ranking: Ranking, folder: AnnealFolder) -> dict[str, Any]:
    """Return the ranking as scores.json and `--json` have it."""
    return {
        "folder": str(folder.root),
        "page": str(folder.page),
        "unit": "bits per byte",
        "weights": dict(ranking.weights),
        "noise": ranking.noise,
        "waiting": list(ranking.waiting),
        "candidates": [
            {
                "name": candidate.name,
                "score": candidate.score,
                "error": ranking.standard_error(candidate),
                "clearly_worse": ranking.is_clearly_worse(candidate),
                "by_source": candidate.by_source,
                "shares": dict(candidate.shares),
                "tokens": candidate.tokens,
                "runs": [vars(run) for run in candidate.runs],
            }
            for candidate in ranking.candidates
        ],
    }
