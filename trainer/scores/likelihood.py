"""Log-likelihoods of tokens, computed in batches of rows with similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...models.model.model import Model
from .team import Team

T = TypeVar("T")

SCORE = "score"
"""Name of the team's function that scores."""
POSITIONS = 1024
"""Positions whose logits exist at once: a whole batch of logits would fill the memory."""


@dataclass(frozen=True)
class ScoredRow:
    """A sequence, and the positions of the tokens to score."""

    ids: Sequence[int]
    scored: Sequence[int]
    """Positions from 1 on: nothing predicts the first token."""


@dataclass(frozen=True)
class Score:
    """Scores of a row's scored tokens, conditioned on all tokens before them."""

    log_likelihoods: list[float]
    likeliest: list[bool]
    """True where the model finds no other token more likely."""

    @property
    def total(self) -> float:
        return sum(self.log_likelihoods)


def score_rows(team: Team, rows: Sequence[ScoredRow], batch_tokens: int) -> list[Score]:
    """Score the rows on a team, whose function SCORE is `score_batch`. A batch has at most
    `batch_tokens` tokens, with padding, and at least one row."""
    row_numbers = list(batch_by_length([len(row.ids) for row in rows], batch_tokens))
    batches = [[rows[number] for number in numbers] for numbers in row_numbers]
    return restore_order(row_numbers, team.map_batches(SCORE, batches, "scoring", " rows"))


def restore_order(numbers: Sequence[Sequence[int]], results: Sequence[Sequence[T]]) -> list[T]:
    """Flatten the batches of `results`, sorted by the numbers of their rows."""
    pairs = [pair for batch in map(zip, numbers, results) for pair in batch]
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]


def batch_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of row numbers, the longest rows first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.no_grad()
def score_batch(model: Model, rows: Sequence[ScoredRow]) -> list[Score]:
    """Score a batch. Padding follows the rows, where a causal model does not see it."""
    device = model.embedding.weight.device
    length = max(len(row.ids) for row in rows) - 1
    inputs = [[*row.ids[:-1], *[0] * (length - len(row.ids) + 1)] for row in rows]
    indices = [
        number * length + position - 1 for number, row in enumerate(rows) for position in row.scored
    ]
    targets = [row.ids[position] for row in rows for position in row.scored]
    hidden, _ = model.hidden(torch.tensor(inputs, device=device))
    hidden = hidden.flatten(0, 1)[torch.tensor(indices, device=device)]
    likelihoods, likeliest = _score_targets(model, hidden, torch.tensor(targets, device=device))
    scores, end = [], 0
    for row in rows:
        start, end = end, end + len(row.scored)
        scores.append(Score(likelihoods[start:end], likeliest[start:end]))
    return scores


def _score_targets(model: Model, hidden: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """Score all targets [n], `POSITIONS` at a time."""
    likelihoods: list[float] = []
    likeliest: list[bool] = []
    for chunk in zip(hidden.split(POSITIONS), targets.split(POSITIONS), strict=True):
        chunk_likelihoods, chunk_likeliest = score_positions(model, *chunk)
        likelihoods += chunk_likelihoods.tolist()
        likeliest += chunk_likeliest.tolist()
    return likelihoods, likeliest


def score_positions(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return, by target [n], its log-likelihood and whether it is the likeliest token. `hidden` is
    [n, d_model]."""
    logits = model.logits(hidden[None])[0].float().log_softmax(dim=-1)
    return logits.gather(1, targets[:, None])[:, 0], logits.argmax(dim=-1) == targets
