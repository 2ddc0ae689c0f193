"""Log-likelihoods of tokens, computed in batches of rows with similar lengths.

score_rows → batches, the longest rows first → score_batch on the team's ranks → scores by row
"""

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
"""Name under which a team has `score_batch`."""
POSITIONS = 1024
"""Positions whose logits exist at once: those of a whole batch would fill the memory."""


@dataclass(frozen=True)
class ScoredRow:
    """A sequence, and the tokens of it to score."""

    ids: Sequence[int]
    scored: Sequence[int]
    """Positions of the tokens to score, from 1 on: nothing predicts the first token."""


@dataclass(frozen=True)
class Score:
    """Scores of a row's `scored` tokens, each conditioned on all tokens before it."""

    log_likelihoods: list[float]
    """[scored] Natural logarithms."""
    likeliest: list[bool]
    """[scored] True where the token has the largest logit."""

    @property
    def total(self) -> float:
        """The log-likelihood of all scored tokens together."""
        return sum(self.log_likelihoods)


def score_rows(team: Team, rows: Sequence[ScoredRow], batch_tokens: int) -> list[Score]:
    """Return a score per row, in order. The team's function SCORE is `score_batch`."""
    batch_ids = list(batch_by_length([len(row.ids) for row in rows], batch_tokens))
    batches = [[rows[row_id] for row_id in row_ids] for row_ids in batch_ids]
    return restore_order(batch_ids, team.map_batches(SCORE, batches, "scoring", " rows"))


def restore_order(batch_ids: Sequence[Sequence[int]], results: Sequence[Sequence[T]]) -> list[T]:
    """Flatten batches of results, by ascending row id. `batch_ids`: the row id of each result."""
    pairs = [pair for batch in map(zip, batch_ids, results) for pair in batch]
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]


def batch_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of row ids (indices into `lengths`), the longest rows first.

    A batch has at most `batch_tokens` tokens, padding included, but at least one row.
    """
    batch: list[int] = []
    for row_id in sorted(range(len(lengths)), key=lambda row_id: -lengths[row_id]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row_id)
    if batch:
        yield batch


@torch.no_grad()
def score_batch(model: Model, rows: Sequence[ScoredRow]) -> list[Score]:
    """Score rows together. Padding follows a row, so a causal model does not see it."""
    device = model.embedding.weight.device
    length = max(len(row.ids) for row in rows) - 1  # the last token is no input
    inputs = [[*row.ids[:-1], *[0] * (length - len(row.ids) + 1)] for row in rows]
    # The state that predicts a token is that of the position before.
    indices = [
        number * length + position - 1 for number, row in enumerate(rows) for position in row.scored
    ]
    targets = [row.ids[position] for row in rows for position in row.scored]
    hidden, _ = model.hidden(torch.tensor(inputs, device=device))  # [rows, length, d_model]
    hidden = hidden.flatten(0, 1)[torch.tensor(indices, device=device)]  # [targets, d_model]
    likelihoods, likeliest = _score_targets(model, hidden, torch.tensor(targets, device=device))
    scores, end = [], 0
    for row in rows:
        start, end = end, end + len(row.scored)
        scores.append(Score(likelihoods[start:end], likeliest[start:end]))
    return scores


def _score_targets(model: Model, hidden: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """Score targets [n] from hidden states [n, d_model], POSITIONS at a time."""
    likelihoods: list[float] = []
    likeliest: list[bool] = []
    for chunk in zip(hidden.split(POSITIONS), targets.split(POSITIONS), strict=True):
        chunk_likelihoods, chunk_likeliest = score_positions(model, *chunk)
        likelihoods += chunk_likelihoods.tolist()
        likeliest += chunk_likeliest.tolist()
    return likelihoods, likeliest


def score_positions(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's log-likelihood [n], and whether it is the likeliest token [n].

    hidden [n, d_model]: the states that predict the targets [n].
    """
    log_probs = model.logits(hidden[None])[0].float().log_softmax(dim=-1)  # [n, vocab]
    return log_probs.gather(1, targets[:, None])[:, 0], log_probs.argmax(dim=-1) == targets
