"""What an engine trains: the model and its loss as one module, so that the loss is sums.

The mean that training minimises is over the whole global batch. No rank knows it alone, so the
module gives sums and the loop divides by the weight of all ranks' micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ...models.documents import Documents
from ...models.model import Model
from ...models.parallel.tensor import highest

PREFIX = "model."


class Sums(NamedTuple):
    total: torch.Tensor
    """What backward starts from: Σ w·ℓ, and the routers' losses in proportion to Σ w."""
    rows: torch.Tensor
    """Σ w·ℓ of each row, for the losses by source. Both are this process's share, where a layout
    divides rows: the loss is their sum over the axes."""


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
    ) -> Sums:
        # Rows of padding have no weights, in any part: the routers are not to count them.
        text = highest((weights != 0).any(dim=1).int(), self.model.axes.context).bool()
        hidden, auxiliary = self.model.hidden(tokens, documents, rows=text)
        z_loss = self.z_loss if self.training else 0.0
        total, rows = self.model.loss(hidden, targets, weights, z_loss)
        return Sums(total + auxiliary * weights.sum(), rows)


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their logical names: the model's own, whatever wraps it."""
    return {_logical(name): parameter for name, parameter in module.named_parameters()}


def _logical(name: str) -> str:
    return name.removeprefix(PREFIX).replace("_orig_mod.", "")
