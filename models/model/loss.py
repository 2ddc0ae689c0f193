"""The loss as sums: the caller divides by the global batch's total weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.precision import widen
from ..kernels import linear_cross_entropy
from ..parallel.axes import ALONE, Axis
from ..parallel.tensor import reduce_max, scatter


class LossParts(NamedTuple):
    """Sums and terms of the loss without gradients, a rank's share of each."""

    rows: Tensor
    """Σ w·ℓ of the cross entropy by row, [rows]."""
    penalties: Tensor
    """Σ w·ℓ of the z-loss by row, [rows]."""
    tokens: Tensor
    """w·ℓ of the cross entropy by token, [rows, tokens]. Where the vocabulary is sharded, either
    this rank's slice of the row, or a share of every token."""


class TokenLosses(NamedTuple):
    """Per-token w·ℓ, fp32."""

    entropies: Tensor
    """Cross entropy: ℓ = −log p(target)."""
    penalties: Tensor | None
    """z-loss: ℓ = z_loss · log²Z; None without one."""
    objective: Tensor
    """Sum of both."""
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
    """Return (Σ w·ℓ, Σ w) in fp32, where ℓ = −log p(target) + z_loss · log²Z.

    logits [..., vocabulary], targets [...], weights [...] (ones if not given). Targets with weight
    zero are not read, and may be any number.

    If the axis shards the vocabulary (`vocab_size` rows in all), the sums are over this rank's
    slice of the flattened tokens.
    """
    losses = token_losses(logits, targets, weights, z_loss, axis, vocab_size)
    return losses.objective.sum(), losses.weights.sum()


def row_losses(
    logits: Tensor, targets: Tensor, weights: Tensor, *, z_loss: float, axis: Axis, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ w·ℓ for a row, as in `cross_entropy`; and, without gradients, the cross entropy and
    z-loss sums [2], and the cross entropies by token. logits [length, vocabulary], targets and
    weights [length]."""
    losses = token_losses(logits, targets, weights, z_loss, axis, vocab_size)
    total = losses.objective.sum()
    if losses.penalties is None:
        row_parts = [total.detach(), torch.zeros_like(total)]
    else:
        row_parts = [losses.entropies.detach().sum(), losses.penalties.detach().sum()]
    return total, torch.stack(row_parts), losses.entropies.detach()


def token_losses(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    z_loss: float,
    axis: Axis,
    vocab_size: int | None,
) -> TokenLosses:
    """Return the per-token terms w·ℓ of `cross_entropy`, [tokens]."""
    wide_logits = widen(logits.flatten(0, -2))
    flat_targets = targets.flatten()
    if weights is None:
        weights = torch.ones_like(flat_targets, dtype=wide_logits.dtype)
    weights = weights.flatten().to(wide_logits.dtype)
    read = weights != 0
    flat_targets = torch.where(read, flat_targets, 0)
    if axis.size == 1:
        losses = F.cross_entropy(wide_logits, flat_targets, reduction="none")
        log_z = torch.logsumexp(wide_logits, dim=-1) if z_loss else None
    else:
        assert vocab_size is not None
        target_logits, log_z = _sharded(
            wide_logits, flat_targets, axis, axis.part_range(vocab_size)
        )
        losses = log_z - target_logits
        local_tokens = axis.part(len(flat_targets))
        read, weights = read[local_tokens], weights[local_tokens]
    entropies = torch.where(read, losses, 0) * weights
    if log_z is None or not z_loss:
        return TokenLosses(entropies, None, entropies, weights)
    penalties = z_loss * log_z.square()
    objective = torch.where(read, losses + penalties, 0) * weights
    return TokenLosses(entropies, torch.where(read, penalties, 0) * weights, objective, weights)


def fused_loss(
    hidden: Tensor,
    table: Tensor,
    *,
    targets: Tensor,
    weights: Tensor,
    z_loss: float,
    vocab_size: int,
    axis: Axis = ALONE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ w·ℓ for logits hidden [rows, length, width] · tableᵀ, table [vocabulary, width],
    without materialising them; and, without gradients, per-row cross entropy and z-loss sums
    [2, rows], and the cross entropies by token [rows, length]. If the axis shards the vocabulary,
    each of N ranks returns 1/N."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # autocast does not reach into custom ops
        hidden, table = (t.to(torch.get_autocast_dtype(device)) for t in (hidden, table))
    total, losses, *_ = linear_cross_entropy.linear_cross_entropy(
        hidden.flatten(0, 1),
        table,
        targets.flatten(),
        weights.flatten().float(),
        z_loss,
        torch.is_grad_enabled(),
        vocab_size,
        axis.name,
    )
    losses = losses.view(2, *targets.shape)
    tokens = losses[0] if axis.size == 1 else losses[0] / axis.size
    return total / axis.size, losses.sum(2) / axis.size, tokens


def _sharded(
    logits: Tensor, targets: Tensor, axis: Axis, local_ids: range
) -> tuple[Tensor, Tensor]:
    """Return target logits and log Σ exp(logits) for this rank's tokens.

    logits [tokens, local ids]; only sums over ids cross the axis."""
    max_logits = reduce_max(logits.detach().amax(dim=-1), axis)
    exp_sums = (logits - max_logits.unsqueeze(-1)).exp().sum(dim=-1)
    is_local = (targets >= local_ids.start) & (targets < local_ids.stop)
    local_index = torch.where(is_local, targets - local_ids.start, 0).unsqueeze(-1)
    target_logits = torch.where(is_local, logits.gather(-1, local_index).squeeze(-1), 0)
    target_logit, total_exp = scatter(torch.stack([target_logits, exp_sums]), axis).unbind()
    return target_logit, total_exp.log() + max_logits[axis.part(len(max_logits))]
