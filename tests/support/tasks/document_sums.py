"""The losses of documents in layouts of a pool's ranks, and those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.tasks.piped import LENGTH, Plain, config_of, groups, keep, objective_of

from headrace.models.documents import Documents
from headrace.models.parallel.axes import ALONE
from headrace.trainer.loop.documents import piece_losses
from headrace.trainer.loop.documents.largest import gather_pieces
from headrace.trainer.loop.documents.piece_losses import StepPieces
from headrace.trainer.loop.execute import execute
from headrace.trainer.loop.step_stats import PIECES, gather

ROWS, MICRO_ROWS = 8, 2
STARTS = [[0, 7], [0], [0, 5, 6, 20], [0, 12], [0, 23], [0], [0, 3], [0, 11, 18]]
"""First tokens of the documents in each row."""


@dataclass
class Batch:
    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    cu_seqlens: torch.Tensor
    documents: Any
    rows: list[int]
    sources: list[int]
    digests: list[bytes]


def global_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and weights; documents have uneven weights, and one of them none."""
    numbers = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 37, (ROWS, LENGTH + 1), generator=numbers)
    weights = torch.rand(ROWS, LENGTH, generator=numbers, dtype=torch.float64)
    weights[3, :12] = 0
    return tokens, weights


def batch_of(rows: range, columns: slice) -> Batch:
    tokens, weights = global_rows()
    starts = [n * LENGTH + first for n, row in enumerate(rows) for first in STARTS[row]]
    bounds = np.array([*starts, len(rows) * LENGTH])
    return Batch(
        tokens[rows][:, :-1][:, columns],
        tokens[rows][:, 1:][:, columns],
        weights[rows][:, columns],
        torch.tensor(bounds, dtype=torch.int32),
        bounds,
        [row + 40 for row in rows],
        [0] * len(rows),
        [bytes(16)] * len(rows),
    )


def expected(model: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Return (Σ w·ℓ, Σ w) by (row, first token), token by token from the logits of one process."""
    objective, batch = objective_of(config_of(model)), batch_of(range(ROWS), slice(None))
    objective.model.axes = type(objective.model.axes)(tensor=ALONE, context=ALONE)
    documents = Documents.build(batch.cu_seqlens, (ROWS, LENGTH))
    with torch.no_grad():
        hidden = objective.model.hidden(batch.tokens, documents)[0]
        logs = torch.log_softmax(objective.model.logits(hidden), -1)
    sums = {}
    for row, starts in enumerate(STARTS):
        for first, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            places = range(first, end)
            weights = [float(batch.weights[row, n]) for n in places]
            losses = [-float(logs[row, n, batch.targets[row, n]]) for n in places]
            if any(weights):
                total = sum(w * loss for w, loss in zip(weights, losses, strict=True))
                sums[row + 40, first] = (total, sum(weights))
    return sums


def of_one_rank(folder: Path, layouts: list[str], model: str) -> dict[str, Any]:
    """Return what `by_layout` returns if ranks do not add their sums."""
    with mock.patch.object(piece_losses, "reduce", lambda sums, axis: sums):
        return by_layout(folder, layouts, model)


def by_layout(folder: Path, layouts: list[str], model: str) -> dict[str, Any]:
    """Return the largest pieces of a step, and all of them, in each layout; `one` has those of one
    process."""
    pieces: dict[str, Any] = {"one": expected(model)}
    for words in layouts:
        parallel = groups(words, model if "pp" in words else "")
        objective = objective_of(config_of(model))
        keep(objective.model, parallel)
        share = range(
            ROWS * parallel.dp_rank // parallel.dp, ROWS * (parallel.dp_rank + 1) // parallel.dp
        )
        columns = parallel.axes.context.part(LENGTH)
        batches: Any = [
            batch_of(share[first : first + MICRO_ROWS], columns)
            for first in range(0, len(share), MICRO_ROWS)
        ]
        engine: Any = Plain(objective)
        token_losses: list[torch.Tensor] = []
        orders = parallel.pipe.orders(len(batches))
        losses = execute(orders, batches, engine, parallel, 7.0, token_losses)
        step = StepPieces.sum(batches, token_losses, parallel, "weights")
        measured = {PIECES: step.losses(step.sums, 8)} if parallel.reports_rows else {}
        stats = gather(batches, losses, 1, range(40, 40 + ROWS), parallel, "weights", measured)
        pieces[words] = stats.pieces, gather_pieces(step.losses(step.sums), parallel)
    return pieces
