"""Models whose rows are divided: every operator gives on the parts what it gives on whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ranks import Ranks

from headrace.models.documents import Documents
from headrace.models.model import Model

ROWS, LENGTH = 3, 48
CUTS = [0, 1, 2, 9, 46, 48, 60, 72, 73, 144]
"""A document over all parts, others that begin at a cut or just behind, a row that is one."""
BOUND = 1e-12


def batch(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH), generator=generator)
    probe = torch.randn(*tokens.shape, model.config.vocab_size, generator=generator).double()
    return tokens, probe


def alone(model: Model, cuts: list[int] | None) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """In one process: logits, auxiliary losses, gradients."""
    tokens, probe = batch(model)
    documents = None
    if cuts is not None:
        documents = Documents.from_cu_seqlens(torch.tensor(cuts), (ROWS, LENGTH))
    hidden, losses = model.hidden(tokens, documents)
    logits = model.logits(hidden)
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = (logits * probe).sum() + losses
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return logits.detach(), float(losses), dict(zip(names, gradients, strict=True))


def apart(
    ranks: Ranks, model: Model, cuts: list[int] | None, *, dropped: int = 0, **options: Any
) -> float:
    """The greatest difference between the parts and the whole, of logits, losses and gradients.

    `dropped` ranks are left out of the sum of gradients.
    """
    tokens, probe = batch(model)
    logits, losses, gradients = alone(model, cuts)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    answers = ranks.run(
        "model_part", model.config, weights, tokens.numpy(), probe.numpy(), cuts, **options
    )
    parts = np.concatenate([part for part, _, _ in answers], axis=1)
    worst = relative(parts, logits.numpy())
    worst = max(worst, *(abs(loss - losses) for _, loss, _ in answers))
    for name, wanted in gradients.items():
        if wanted is not None:
            summed = sum(found[name] for _, _, found in answers[dropped:])
            worst = max(worst, relative(summed, wanted.numpy()))
    return worst


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))


def test_every_operator(two: Ranks, four: Ranks, tiny: Model) -> None:
    """On four ranks filters reach over several parts, and there are fewer kv_heads than ranks."""
    ring = {"attention": "ring", "hyena_li": "a2a"}
    for cuts in (CUTS, None):
        assert apart(two, tiny, cuts, **ring) < BOUND
        assert apart(four, tiny, cuts, **ring) < BOUND
        if all(getattr(options, "heads", 4) % 4 == 0 for options in tiny.config.operators.values()):
            assert apart(four, tiny, cuts) < BOUND
        assert apart(two, tiny, cuts) < BOUND
