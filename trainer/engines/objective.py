"""Wrap model and loss as a module that an engine trains.

Training minimises a mean over the global batch, which no rank knows alone. So the module returns
sums, and the loop divides them by the sum of `divisor_terms` over all ranks' micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...models.config.options.names import Divisor
from ...models.documents import Documents
from ...models.model.model import Model
from ...models.parallel.tensor import reduce_max

PREFIX = "model."


def divisor_terms(weights: torch.Tensor, divisor: Divisor) -> torch.Tensor:
    """Return what each target adds to the loss divisor, in the shape of `weights`."""
    return weights if divisor == "weights" else (weights != 0).to(weights.dtype)


class Sums(NamedTuple):
    total: torch.Tensor
    """Start of the backward pass: Σ w·ℓ, and the routers' losses by row times the row's divisor.
    If tensor or context parallelism splits the loss, or a pipeline the layers, this is the rank's
    share: the objective is the sum over axes and chunks."""
    rows: torch.Tensor
    """Σ w·ℓ [rows] without the z-loss, for the losses by source; empty before the last chunk."""
    stream: tuple[torch.Tensor, ...] = ()
    """Inputs of the next chunk; empty after the last chunk."""
    tokens: torch.Tensor | None = None
    """w·ℓ by token without the z-loss, for the losses by document (`LossParts.tokens`); None before
    the last chunk."""


class Objective(nn.Module):
    def __init__(self, model: Model, z_loss: float = 0.0, divisor: Divisor = "weights") -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self.divisor = divisor
        self.received: Counter[tuple[int, int]] = Counter()
        """Rows that this rank's experts received in training, by chunk and operator call."""
        self.penalty: torch.Tensor | None = None
        """This rank's share of Σ w·ℓ of the z-loss in training; None if no micro-batch had one."""

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        documents: Documents | None,
        chunk: int = 0,
        stream: Sequence[torch.Tensor] = (),
    ) -> Sums:
        """Run a chunk of the model; the last chunk computes the loss.

        tokens, targets, weights [rows, seq]
        """
        # Padding rows have no weights on any rank, and are excluded from statistics.
        is_text = reduce_max((weights != 0).any(dim=1).int(), self.model.axes.context).bool()
        stream, losses = self.model.run_chunk(chunk, tokens, documents, stream, rows=is_text)
        if self.training:
            calls = enumerate(self.model.received)
            self.received.update({(chunk, number): rows for number, rows in calls})
        auxiliary = (losses * divisor_terms(weights, self.divisor).sum(dim=1)).sum()
        if chunk < len(self.model.chunks) - 1:
            return Sums(auxiliary, weights.new_empty(0), stream)
        z_loss = self.z_loss if self.training else 0.0
        [hidden] = stream
        total, parts = self.model.loss(hidden, targets, weights, z_loss)
        if z_loss:
            penalty = parts.penalties.sum(dtype=torch.float64)
            self.penalty = penalty if self.penalty is None else self.penalty + penalty
        return Sums(total + auxiliary, parts.rows, tokens=parts.tokens)

    def take_penalty(self, device: torch.device) -> torch.Tensor:
        """Return this rank's share of the z-losses in training since the last call [1]."""
        penalty, self.penalty = self.penalty, None
        if penalty is None:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return penalty.view(1)

    def take_received(self) -> list[int]:
        """Return the rows that this rank's experts received in training since the last call, by
        layer."""
        rows_by_layer = [self.received[layer] for layer in sorted(self.received)]
        self.received.clear()
        return rows_by_layer


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the model's names, without those of wrappers."""
    return {_logical(name): parameter for name, parameter in module.named_parameters()}


def _logical(name: str) -> str:
    return name.removeprefix(PREFIX).replace("_orig_mod.", "")
