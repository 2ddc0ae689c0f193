from __future__ import annotations

import torch

from headrace.models.model.loss import cross_entropy


def test_sums_of_weighted_losses() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (2, 5))
    weights = torch.rand(2, 5, dtype=torch.float64)
    total, weight = cross_entropy(logits, targets, weights, z_loss=0.1)
    log_z = logits.exp().sum(-1).log()
    token_losses = log_z - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) + 0.1 * log_z**2
    assert torch.allclose(total, (token_losses * weights).sum(), rtol=1e-12)
    assert torch.allclose(weight, weights.sum())


def test_micro_batches_add_up() -> None:
    logits, targets = torch.randn(4, 5, 7, dtype=torch.float64), torch.randint(0, 7, (4, 5))
    weights = (torch.rand(4, 5) > 0.5).double()
    parts = [
        cross_entropy(logits[i : i + 1], targets[i : i + 1], weights[i : i + 1]) for i in range(4)
    ]
    total, weight = cross_entropy(logits, targets, weights)
    assert torch.allclose(sum(part[0] for part in parts), total)  # type: ignore[arg-type]
    assert torch.allclose(sum(part[1] for part in parts), weight)  # type: ignore[arg-type]


def test_masked_targets_are_not_read() -> None:
    logits = torch.randn(1, 3, 7, requires_grad=True)
    with torch.no_grad():
        logits[0, 1] = float("inf")
    targets = torch.tensor([[1, -100, 999]])
    total, weight = cross_entropy(logits, targets, torch.tensor([[1.0, 0.0, 0.0]]))
    total.backward()
    assert weight == 1 and total.isfinite()
    assert logits.grad is not None
    assert logits.grad[0, 0].abs().sum() > 0
    assert logits.grad[0, 2].abs().sum() == 0


def test_half_precision_is_summed_in_fp32() -> None:
    logits, targets = torch.randn(1, 4000, 7).bfloat16(), torch.randint(0, 7, (1, 4000))
    total, _ = cross_entropy(logits, targets)
    exact, _ = cross_entropy(logits.double(), targets)
    assert total.dtype == torch.float32
    assert abs(float(total - exact)) < 1e-5 * float(exact)
