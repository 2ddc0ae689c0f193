"""Scores of the candidates: held-out bits per byte, by source, beside the noise of seeds.

A candidate's score is the weighted mean of its sources' bits per byte, and the mean over its seeds.
The noise is the standard deviation of a score among the seeds of a candidate, pooled over all
candidates. Two candidates differ clearly if their scores are further apart than CLEAR standard
deviations of that difference.
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

CLEAR = 2.0


@dataclass(frozen=True)
class Run:
    """A finished run of a candidate."""

    seed: int
    folder: str
    plan: str
    ledger: str
    """Last hash of the ledger."""
    by_source: Mapping[str, float]
    score: float


@dataclass(frozen=True)
class Scored:
    """A candidate with its finished runs."""

    name: str
    shares: Mapping[str, float]
    """Share of each source in all tokens of the plan."""
    tokens: int
    runs: Sequence[Run]

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
    candidates: Sequence[Scored]
    """The best first."""
    weights: Mapping[str, float]
    """Weight of each held-out source in a score."""
    noise: float | None
    """Standard deviation of a score among seeds; None if no candidate has several."""
    waiting: Sequence[str]
    """Runs that are not finished."""

    @property
    def best(self) -> Scored:
        return self.candidates[0]

    def error(self, candidate: Scored) -> float | None:
        """Return the standard error of a candidate's score."""
        return None if self.noise is None else self.noise / math.sqrt(len(candidate.runs))

    def is_clear(self, candidate: Scored) -> bool | None:
        """Return whether a candidate is clearly worse than the best; None without noise."""
        if self.noise is None:
            return None
        pairs = 1 / len(candidate.runs) + 1 / len(self.best.runs)
        return candidate.score - self.best.score > CLEAR * self.noise * math.sqrt(pairs)


def check_weights(weights: Mapping[str, float], held_out: Collection[str]) -> None:
    """Raise if the score names a source without held-out rows."""
    if unknown := [name for name in weights if name not in held_out]:
        raise MisuseError(
            f"--score names {', '.join(unknown)}, which no held-out dataset has",
            hint=f"the held-out sources are {', '.join(sorted(held_out))}",
        )


def rank(folder: AnnealFolder, entries: Sequence[Entry], weights: Mapping[str, float]) -> Ranking:
    """Rank the candidates by their finished runs. Without `weights` all sources count alike."""
    done = [entry for entry in entries if is_finished(folder, entry)]
    if not done:
        raise RunError(f"no run of {folder.root} is finished", hint="train them first")
    sizes = _bytes_per_token(folder, done[0])
    total = sum(weights.values()) or float(len(sizes))
    parts = {name: weights.get(name, 0.0 if weights else 1.0) / total for name in sizes}
    found = [
        _scored(folder, list(group), sizes, parts)
        for _, group in groupby(done, key=lambda entry: entry.name)
    ]
    return Ranking(
        candidates=sorted(found, key=lambda each: each.score),
        weights=parts,
        noise=_noise(found),
        waiting=[f"{entry.name}, seed {entry.seed}" for entry in entries if entry not in done],
    )


def _bytes_per_token(folder: AnnealFolder, entry: Entry) -> dict[str, float]:
    """Return the bytes per token of the held-out datasets, which all runs share."""
    held_out = Plan.load(str(read_run(folder.run_of(entry.number)).held_out))
    return bytes_per_token({source.name: source.url for source in held_out.sources})


def _scored(
    folder: AnnealFolder,
    entries: Sequence[Entry],
    sizes: Mapping[str, float],
    weights: Mapping[str, float],
) -> Scored:
    plan = Plan.load(str(folder.run_of(entries[0].number).plan))
    runs = [_run(folder, entry, sizes, weights) for entry in entries]
    return Scored(entries[0].name, shares_of(plan), entries[0].tokens, runs)


def shares_of(plan: Plan) -> dict[str, float]:
    """Return the share of each source that a plan draws from, over all of its phases."""
    tokens = plan.last_token - plan.first_token
    found = [0.0] * len(plan.sources)
    for phase in plan.phases:
        for number, share in enumerate(drawn_shares(phase)):
            found[number] += float(share) * phase.rows * phase.seq_len / tokens
    return {each.name: share for each, share in zip(plan.sources, found, strict=True) if share}


def _run(
    folder: AnnealFolder, entry: Entry, sizes: Mapping[str, float], weights: Mapping[str, float]
) -> Run:
    run = folder.run_of(entry.number)
    *_, evaluation = lines.read(run.evaluations)  # the end of a phase is evaluated
    end = ledger.last(run.ledger) if run.ledger.exists() else None
    by_source = {}
    for name, size in sizes.items():
        loss = evaluation["sources"][name]["loss"]
        by_source[name] = math.inf if loss is None else bits_per_byte(loss, size)
    return Run(
        seed=entry.seed,
        folder=str(run.root),
        plan=entry.plan,
        ledger=end.hash if end else ledger.NAME,
        by_source=by_source,
        score=sum(weights[name] * bits for name, bits in by_source.items() if weights[name]),
    )


def _noise(found: Sequence[Scored]) -> float | None:
    groups = [[run.score for run in each.runs] for each in found if len(each.runs) > 1]
    freedom = sum(len(scores) - 1 for scores in groups)
    if not freedom:
        return None
    squares = sum((score - statistics.mean(scores)) ** 2 for scores in groups for score in scores)
    return math.sqrt(squares / freedom)


def as_json(ranking: Ranking, folder: AnnealFolder) -> dict[str, Any]:
    return {
        "folder": str(folder.root),
        "page": str(folder.page),
        "unit": "bits per byte",
        "weights": dict(ranking.weights),
        "noise": ranking.noise,
        "waiting": list(ranking.waiting),
        "candidates": [
            {
                "name": each.name,
                "score": each.score,
                "error": ranking.error(each),
                "clearly_worse": ranking.is_clear(each),
                "by_source": each.by_source,
                "shares": dict(each.shares),
                "tokens": each.tokens,
                "runs": [vars(run) for run in each.runs],
            }
            for each in ranking.candidates
        ],
    }
