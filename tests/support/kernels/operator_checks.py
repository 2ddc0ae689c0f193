"""Checks of every operator: values against a token-by-token definition, and gradients.

A definition maps one document [length, width] to the same shape, with loops and the formulas of
the operator's docstring, using the operator's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from headrace.models.documents import Documents
from headrace.models.operators import OPERATORS, BatchContext, Operator

Definition = Callable[[Any, Tensor], Tensor]
BOUND = 1e-10
LENGTHS = (1, 2, 7, 8, 9, 31, 37)
"""One, primes, and lengths on both sides of the chunks of 8 and 16 that tests use."""
CUTS = (0, 1, 3, 11, 12, 37)
"""Boundaries in a row of 37 tokens: documents of 1, 2, 8, 1 and 25 tokens."""


def make(kind: str, width: int = 8, seed: int = 0, **options: Any) -> Any:
    """Build an operator in fp64, with weights so large that each affects the output."""
    operator = OPERATORS[kind](OPERATORS[kind].Options(kind=kind, **options), width).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in operator.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # Rates and decays stay in ranges with long memory; matrices preserve the input's scale.
        scale = (
            0.3 if parameter.ndim < 2 or name in operator.no_decay else parameter.shape[-1] ** -0.5
        )
        parameter.data = scale * noise
    return operator.eval()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(rows: int, length: int, cuts: Sequence[int] | None = None) -> BatchContext:
    """Return the context of rows of one document each, or of rows with boundaries `cuts`."""
    if cuts is None:
        return BatchContext(torch.arange(length).unsqueeze(0))
    edges = sorted({0, rows * length, *(r * length + cut for r in range(rows) for cut in cuts)})
    documents = Documents.build(torch.tensor(edges), (rows, length))
    return BatchContext(documents.positions, documents)


def distance(
    operator: Operator, definition: Definition, cuts: Sequence[int] | None = None
) -> float:
    """Return the largest difference over rows of every length, or over packed documents."""
    worst = 0.0
    with torch.no_grad():
        for length in LENGTHS if cuts is None else [CUTS[-1]]:
            u = normal(2, length, operator.width)
            y = operator(u, context(2, length, cuts))
            for row, got in zip(u, y, strict=True):
                spans = pairwise(cuts or (0, length))
                expected = torch.cat([definition(operator, row[a:b]) for a, b in spans])
                worst = max(worst, float((got - expected).abs().max()))
    return worst


def is_its_definition(operator: Operator, definition: Definition) -> None:
    """Compare rows of all lengths, packed rows, and gradients with finite differences."""
    assert distance(operator, definition) < BOUND
    assert distance(operator, definition, CUTS) < BOUND
    names, parameters = zip(*operator.named_parameters(), strict=True)
    where = context(1, 7, (0, 1, 4, 7))

    def run(u: Tensor, *weights: Tensor) -> Tensor:
        result: Tensor = functional_call(
            operator, dict(zip(names, weights, strict=True)), (u, where)
        )
        return result

    u = normal(1, 7, operator.width).requires_grad_()
    leaves = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    assert torch.autograd.gradcheck(run, (u, *leaves), fast_mode=True)


def is_seen(
    operator: Operator,
    definition: Definition,
    change: Callable[[Any], None],
    min_change: float = 1e-3,
) -> None:
    """Negative control: a changed operator differs from the definition of the original."""
    changed = copy.deepcopy(operator)
    with torch.no_grad():
        change(changed)
    far = distance(changed, lambda _, u: definition(operator, u))
    assert far > min_change, far


def documents_matter(operator: Operator, definition: Definition) -> None:
    """Negative control: without isolation, a packed row differs from its documents alone."""
    u = normal(1, CUTS[-1], operator.width)
    expected = torch.cat([definition(operator, u[0, a:b]) for a, b in pairwise(CUTS)])
    y = operator(u, context(1, CUTS[-1]))[0]
    assert (y[:1] - expected[:1]).abs().max() < BOUND
    assert (y[1:] - expected[1:]).abs().max() > 1e-3


def rounds_to(operator: Operator, bound: float, length: int = 37) -> None:
    """Bound the error of bf16 against fp64, relative to the largest output."""
    half = copy.deepcopy(operator).bfloat16()
    exact = copy.deepcopy(half).double()
    u = normal(2, length, operator.width).bfloat16()
    with torch.no_grad():
        y = half(u, context(2, length, CUTS))
        expected = exact(u.double(), context(2, length, CUTS))
    assert y.dtype == torch.bfloat16
    assert float((y.double() - expected).abs().max() / expected.abs().max()) < bound


def convolved(w: Tensor, taps: Tensor) -> Tensor:
    """y_t = Σ_j h[c, j]·w_{t−j}: w [length, width], a filter for each channel."""
    y = torch.zeros_like(w)
    for t in range(len(w)):
        for back in range(min(t + 1, taps.shape[1])):
            y[t] += taps[:, back] * w[t - back]
    return y


def for_channels(taps: Tensor, width: int) -> Tensor:
    """Expand filters of groups to filters of channels."""
    return torch.stack([taps[channel * len(taps) // width] for channel in range(width)])


def featurized(operator: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k ⊙ v of a Hyena operator."""
    z = convolved(u @ operator.qkv.weight.T, operator.featurizer.taps)
    q, k, v = z.split(operator.width, dim=-1)
    return q, k * v
