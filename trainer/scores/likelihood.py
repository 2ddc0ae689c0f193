"""Log-likelihoods of tokens in sequences, computed in batches of similar lengths."""

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
"""Name of the work of a team."""
POSITIONS = 1024
"""Positions whose logits exist at once: those of a whole batch would fill the memory."""


@dataclass(frozen=True)
class Row:
    """A sequence, and the positions of the tokens that are scored."""

    ids: Sequence[int]
    scored: Sequence[int]
    """Positions from 1 on: nothing predicts the first token."""


@dataclass(frozen=True)
class Score:
    """Scores of the scored tokens of a row, each given all tokens before it."""

    log_likelihoods: list[float]
    likeliest: list[bool]
    """True where the model finds no other token more likely."""

    @property
    def total(self) -> float:
        return sum(self.log_likelihoods)


def score(team: Team, rows: Sequence[Row], batch_tokens: int) -> list[Score]:
    """Score the rows on the ranks of a team, whose work SCORE is `score_batch`. A batch has at most
    `batch_tokens` tokens with its padding, and at least one row."""
    cut = list(batches([len(row.ids) for row in rows], batch_tokens))
    asked = [[rows[number] for number in batch] for batch in cut]
    found = team.ask(SCORE, asked, "scoring", " rows")
    return in_order(cut, found)


def in_order(cut: Sequence[Sequence[int]], found: Sequence[Sequence[T]]) -> list[T]:
    """Return the results of batches in the order of the numbers that the batches hold."""
    pairs = [pair for batch in map(zip, cut, found) for pair in batch]
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each batch, the longest rows first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.no_grad()
def score_batch(model: Model, rows: Sequence[Row]) -> list[Score]:
    """Score the rows of a batch. Padding stands after a row, where a causal model does not see
    it."""
    device = model.embedding.weight.device
    length = max(len(row.ids) for row in rows) - 1
    inputs = [[*row.ids[:-1], *[0] * (length - len(row.ids) + 1)] for row in rows]
    places = [
        number * length + place - 1 for number, row in enumerate(rows) for place in row.scored
    ]
    targets = [row.ids[place] for row in rows for place in row.scored]
    hidden, _ = model.hidden(torch.tensor(inputs, device=device))
    chosen = hidden.flatten(0, 1)[torch.tensor(places, device=device)]
    likelihoods, likeliest = _of_targets(model, chosen, torch.tensor(targets, device=device))
    scores, end = [], 0
    for row in rows:
        start, end = end, end + len(row.scored)
        scores.append(Score(likelihoods[start:end], likeliest[start:end]))
    return scores


def _of_targets(model: Model, hidden: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """Return the log-likelihood of each target, and whether it is the likeliest token."""
    likelihoods: list[float] = []
    likeliest: list[bool] = []
    for part, wanted in zip(hidden.split(POSITIONS), targets.split(POSITIONS), strict=True):
        found, best = score_part(model, part, wanted)
        likelihoods += found.tolist()
        likeliest += best.tolist()
    return likelihoods, likeliest


def score_part(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each target, and whether it is the likeliest token."""
    logits = model.logits(hidden[None])[0].float().log_softmax(dim=-1)
    return logits.gather(1, targets[:, None])[:, 0], logits.argmax(dim=-1) == targets
