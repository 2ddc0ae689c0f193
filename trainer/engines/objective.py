"""The objective: model and loss as one module, which an engine trains.

Training minimises a mean over the global batch. No rank knows it alone, so the module returns sums
and the loop divides them by the sum of `counted` over all ranks' micro-batches.
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
from ...models.parallel.tensor import highest

PREFIX = "model."


def counted(weights: torch.Tensor, divisor: Divisor) -> torch.Tensor:
    """Return what each target adds to the divisor of the loss."""
    return weights if divisor == "weights" else (weights != 0).to(weights.dtype)


class Sums(NamedTuple):
    total: torch.Tensor
    """Start of the backward pass: Σ w·ℓ, and the routers' losses of each row times its divisor.
    Where tensor or context parallelism splits the loss, or a pipeline the layers, this is the
    rank's part: the objective is the sum over the axes and the chunks."""
    rows: torch.Tensor
    """Σ w·ℓ of each row without the z-loss, for the losses by source; empty from a chunk without
    the loss."""
    stream: tuple[torch.Tensor, ...] = ()
    """Inputs of the next chunk; empty from the last."""


class Objective(nn.Module):
    def __init__(self, model: Model, z_loss: float = 0.0, divisor: Divisor = "weights") -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self.divisor = divisor
        self.received: Counter[tuple[int, int]] = Counter()
        """Rows that this rank's experts received in training, by chunk and operator call."""
        self.penalty: torch.Tensor | None = None
        """Σ w·ℓ of the z-loss in training, this rank's part; None: no micro-batch had one."""

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        documents: Documents | None,
        chunk: int = 0,
        stream: Sequence[torch.Tensor] = (),
    ) -> Sums:
        """Run one chunk of the model; the last computes the loss."""
        # Padding rows have no weights on any rank: statistics over a micro-batch leave them out.
        text = highest((weights != 0).any(dim=1).int(), self.model.axes.context).bool()
        stream, losses = self.model.run_chunk(chunk, tokens, documents, stream, rows=text)
        if self.training:
            calls = enumerate(self.model.received)
            self.received.update({(chunk, number): rows for number, rows in calls})
        auxiliary = (losses * counted(weights, self.divisor).sum(dim=1)).sum()
        if chunk < len(self.model.chunks) - 1:
            return Sums(auxiliary, weights.new_empty(0), stream)
        z_loss = self.z_loss if self.training else 0.0
        [hidden] = stream
        total, (rows, penalties) = self.model.loss(hidden, targets, weights, z_loss)
        if z_loss:
            penalty = penalties.sum(dtype=torch.float64)
            self.penalty = penalty if self.penalty is None else self.penalty + penalty
        return Sums(total + auxiliary, rows)

    def take_penalty(self, device: torch.device) -> torch.Tensor:
        """Return this rank's part of the z-losses in training since the last call, [1]."""
        penalty, self.penalty = self.penalty, None
        if penalty is None:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return penalty.view(1)

    def take_received(self) -> list[int]:
        """Return the rows that this rank's experts received in training since the last call, by
        layer."""
        received = [self.received[layer] for layer in sorted(self.received)]
        self.received.clear()
        return received


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by logical name: the model's own names, whatever wraps it."""
    return {_logical(name): parameter for name, parameter in module.named_parameters()}


def _logical(name: str) -> str:
    return name.removeprefix(PREFIX).replace("_orig_mod.", "")
