"""The loss as sums: the caller divides by the total weight of the global batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.precision import widen
from ..kernels import linear_cross_entropy
from ..parallel.axes import ALONE, Axis
from ..parallel.tensor import highest, scatter


class TokenLosses(NamedTuple):
    """w·ℓ of tokens, fp32."""

    entropies: Tensor
    """Of the cross entropy: ℓ = −log p(target)."""
    penalties: Tensor | None
    """Of the z-loss: ℓ = z_loss · log²Z; None without one."""
    objective: Tensor
    """Of both."""
    weights: Tensor


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    axis: Axis = ALONE,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(Σ w·ℓ, Σ w) in fp32, where ℓ = −log p(target) + z_loss · log²Z.

    logits [..., vocabulary], targets [...], weights [...] (ones if not given). A target of weight
    zero is not read, and may be any number.

    If the axis shards the vocabulary (of `vocab_size` rows), the sums are over this rank's part of
    the flattened tokens.
    """
    losses = token_losses(logits, targets, weights, z_loss, axis, vocab_size)
    return losses.objective.sum(), losses.weights.sum()


def row_losses(
    logits: Tensor, targets: Tensor, weights: Tensor, *, z_loss: float, axis: Axis, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Σ w·ℓ of a row's logits as in `cross_entropy`; and, without gradients, that of the cross
    entropy and that of the z-loss, [2]."""
    losses = token_losses(logits, targets, weights, z_loss, axis, vocab_size)
    total = losses.objective.sum()
    if losses.penalties is None:
        parts = [total.detach(), torch.zeros_like(total)]
    else:
        parts = [losses.entropies.detach().sum(), losses.penalties.detach().sum()]
    return total, torch.stack(parts)


def token_losses(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    z_loss: float,
    axis: Axis,
    vocab_size: int | None,
) -> TokenLosses:
    """Return w·ℓ of each token of `cross_entropy`."""
    wide = widen(logits.flatten(0, -2))
    flat = targets.flatten()
    if weights is None:
        weights = torch.ones_like(flat, dtype=wide.dtype)
    weights = weights.flatten().to(wide.dtype)
    counted = weights != 0
    flat = torch.where(counted, flat, 0)
    if axis.size == 1:
        losses = F.cross_entropy(wide, flat, reduction="none")
        log_z = torch.logsumexp(wide, dim=-1) if z_loss else None
    else:
        assert vocab_size is not None
        target, log_z = _sharded(wide, flat, axis, axis.part_range(vocab_size))
        losses = log_z - target
        own = axis.part(len(flat))
        counted, weights = counted[own], weights[own]
    entropies = torch.where(counted, losses, 0) * weights
    if log_z is None or not z_loss:
        return TokenLosses(entropies, None, entropies, weights)
    penalties = z_loss * log_z.square()
    objective = torch.where(counted, losses + penalties, 0) * weights
    return TokenLosses(entropies, torch.where(counted, penalties, 0) * weights, objective, weights)


def fused_loss(
    hidden: Tensor,
    matrix: Tensor,
    *,
    targets: Tensor,
    weights: Tensor,
    z_loss: float,
    vocab_size: int,
    axis: Axis = ALONE,
) -> tuple[Tensor, Tensor]:
    """Σ w·ℓ of the logits hidden [rows, length, width] · matrixᵀ, which are never whole in memory;
    and, without gradients, the sums of the cross entropy and of the z-loss of each row, [2, rows].
    If the axis shards the vocabulary, each rank returns 1/N of all."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # autocast does not reach into custom ops
        hidden, matrix = (t.to(torch.get_autocast_dtype(device)) for t in (hidden, matrix))
    total, losses, *_ = linear_cross_entropy.linear_cross_entropy(
        hidden.flatten(0, 1),
        matrix,
        targets.flatten(),
        weights.flatten().float(),
        z_loss,
        torch.is_grad_enabled(),
        vocab_size,
        axis.name,
    )
    return total / axis.size, losses.view(2, *targets.shape).sum(2) / axis.size


def _sharded(logits: Tensor, targets: Tensor, axis: Axis, here: range) -> tuple[Tensor, Tensor]:
    """The target's logit and log Σ exp(logits), for this rank's part of the tokens.

    `logits` [tokens, …] are those of the ids in `here`; only sums over ids cross the axis."""
    top = highest(logits.detach().amax(dim=-1), axis)
    sums = (logits - top.unsqueeze(-1)).exp().sum(dim=-1)
    known = (targets >= here.start) & (targets < here.stop)
    index = torch.where(known, targets - here.start, 0).unsqueeze(-1)
    chosen = torch.where(known, logits.gather(-1, index).squeeze(-1), 0)
    target, total = scatter(torch.stack([chosen, sums]), axis).unbind()
    return target, total.log() + top[axis.part(len(top))]
