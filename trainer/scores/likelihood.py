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
from ...models.parallel.tensor import reduce
from ..placement.local_rows import LocalRows, shares_rows, sum_over_ranks
from ..placement.team import Team

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
    """Score rows together. Padding follows a row, so a causal model does not see it. Collective
    over the ranks that share the rows."""
    inputs = LocalRows.cut(model, [row.ids[:-1] for row in rows])  # the last token is no input
    hidden, _ = model.hidden(inputs.ids)  # [rows, local_length, d_model]
    targets = [row.ids[position] for row in rows for position in row.scored]
    predicting = _select_states(model, rows, inputs, hidden)
    likelihoods, likeliest = _score_targets(
        model, predicting, torch.tensor(targets, device=hidden.device)
    )
    scores, end = [], 0
    for row in rows:
        start, end = end, end + len(row.scored)
        scores.append(Score(likelihoods[start:end], likeliest[start:end]))
    return scores


def _select_states(
    model: Model, rows: Sequence[ScoredRow], inputs: LocalRows, hidden: Tensor
) -> Tensor:
    """Return the states that predict the scored tokens, [targets, d_model], on all ranks."""
    length = hidden.shape[1]
    indices, numbers = [], []
    places = ((row, position) for row, item in enumerate(rows) for position in item.scored)
    for number, (row, position) in enumerate(places):
        # The state that predicts a token is that of the position before.
        index = position - 1 - inputs.first_state
        if 0 <= index < length:
            indices.append(row * length + index)
            numbers.append(number)
    states = hidden.flatten(0, 1)[torch.tensor(indices, dtype=torch.int64, device=hidden.device)]
    num_targets = sum(len(row.scored) for row in rows)
    if not shares_rows(model):
        return states
    selected = states.new_zeros(num_targets, states.shape[-1])
    selected[torch.tensor(numbers, dtype=torch.int64, device=hidden.device)] = states
    return sum_over_ranks(model, selected)  # one rank has each state


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
    log_probs = _all_logits(model, hidden).float().log_softmax(dim=-1)  # [n, vocab]
    return log_probs.gather(1, targets[:, None])[:, 0], log_probs.argmax(dim=-1) == targets


def _all_logits(model: Model, hidden: Tensor) -> Tensor:
    """Return logits [n, vocab] of states [n, d_model], which all ranks have."""
    axis = model.axes.tensor
    if axis.size == 1:
        return model.logits(hidden[None])[0]
    padding = -len(hidden) % axis.size
    padded = torch.cat([hidden, hidden.new_zeros(padding, hidden.shape[1])])
    local = padded[axis.part(len(padded))]  # `logits` takes slices of rows, and gathers them
    logits = model.logits(local[None])[0, : len(hidden)]
    vocab_size = model.config.vocab_size  # shards of the vocabulary may differ by a row
    all_logits = logits.new_zeros(len(hidden), vocab_size)
    all_logits[:, axis.part(vocab_size)] = logits
    return reduce(all_logits, axis)
