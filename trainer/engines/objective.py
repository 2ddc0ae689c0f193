"""The objective: model and loss as one module, which an engine trains.

Training minimises a mean over the global batch. No rank knows it alone, so the module returns sums
and the loop divides them by the weight of all ranks' micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...models.documents import Documents
from ...models.model import Model
from ...models.parallel.tensor import highest

PREFIX = "model."


class Sums(NamedTuple):
    total: torch.Tensor
    """Start of the backward pass: Σ w·ℓ, and the routers' losses of each row times its Σ w. Where
    tensor or context parallelism splits the loss, or a pipeline the layers, this is the rank's
    part: the objective is the sum over the axes and the chunks."""
    rows: torch.Tensor
    """Σ w·ℓ of each row, for the losses by source; empty from a chunk without the loss."""
    stream: tuple[torch.Tensor, ...] = ()
    """Inputs of the next chunk; empty from the last."""


class Objective(nn.Module):
    def __init__(self, model: Model, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss

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
        auxiliary = (losses * weights.sum(dim=1)).sum()
        if chunk < len(self.model.chunks) - 1:
            return Sums(auxiliary, weights.new_empty(0), stream)
        z_loss = self.z_loss if self.training else 0.0
        [hidden] = stream
        total, rows = self.model.loss(hidden, targets, weights, z_loss)
        return Sums(total + auxiliary, rows)


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by logical name: the model's own names, whatever wraps it."""
    return {_logical(name): parameter for name, parameter in module.named_parameters()}


def _logical(name: str) -> str:
    return name.removeprefix(PREFIX).replace("_orig_mod.", "")
