"""The loss, as sums: the caller divides by the weights of the whole global batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, *, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(Σ w·ℓ, Σ w) in fp32, where ℓ = −log p(target) + z_loss · log²Z.

    logits [..., vocabulary], targets [...], weights [...] (ones if not given). A target whose
    weight is zero is not read, and may be any number.
    """
    wide = logits.flatten(0, -2).float() if logits.dtype != torch.float64 else logits.flatten(0, -2)
    flat = targets.flatten()
    if weights is None:
        weights = torch.ones_like(flat, dtype=wide.dtype)
    weights = weights.flatten().to(wide.dtype)
    counted = weights != 0
    flat = torch.where(counted, flat, 0)
    losses = F.cross_entropy(wide, flat, reduction="none")
    if z_loss:
        losses = losses + z_loss * torch.logsumexp(wide, dim=-1).square()
    losses = torch.where(counted, losses, 0)
    return (losses * weights).sum(), weights.sum()
