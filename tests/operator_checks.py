"""What is asked of every operator: to be its definition, token by token, and its derivative.

A definition maps one document [length, width] to the same shape, with loops and the formulas of
the operator's docstring, from the operator's weights.
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
"""One, primes, and both sides of the chunks of 8 and 16 that tests use."""
CUTS = (0, 1, 3, 11, 12, 37)
"""Of a row of 37 tokens: documents of 1, 2, 8, 1 and 25."""


def make(kind: str, width: int = 8, seed: int = 0, **options: Any) -> Any:
    """In fp64, with weights large enough that every part matters."""
    operator = OPERATORS[kind](OPERATORS[kind].Options(kind=kind, **options), width).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in operator.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # Rates and decays stay where a state remembers; matrices keep the size of what they map.
        scale = (
            0.3 if parameter.ndim < 2 or name in operator.no_decay else parameter.shape[-1] ** -0.5
        )
        parameter.data = scale * noise
    return operator.eval()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(rows: int, length: int, cuts: Sequence[int] | None = None) -> BatchContext:
    """Of rows that are one document each, or that are all cut at the same places."""
    if cuts is None:
        return BatchContext(torch.arange(length).unsqueeze(0))
    edges = [row * length + cut for row in range(rows) for cut in cuts]
    documents = Documents.from_cu_seqlens(torch.tensor(edges), (rows, length))
    return BatchContext(documents.positions, documents)


def distance(
    operator: Operator, definition: Definition, cuts: Sequence[int] | None = None
) -> float:
    """The largest difference: of rows of every length, or of the documents of packed rows."""
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
    """Rows of all lengths, and packed ones; its gradients are those of finite differences."""
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
    operator: Operator, definition: Definition, change: Callable[[Any], None], least: float = 1e-3
) -> None:
    """A negative control: the operator, changed, is no longer the definition of the original."""
    changed = copy.deepcopy(operator)
    with torch.no_grad():
        change(changed)
    far = distance(changed, lambda _, u: definition(operator, u))
    assert far > least, far


def documents_matter(operator: Operator, definition: Definition) -> None:
    """A negative control: without its documents, a packed row is not what they give alone."""
    u = normal(1, CUTS[-1], operator.width)
    expected = torch.cat([definition(operator, u[0, a:b]) for a, b in pairwise(CUTS)])
    y = operator(u, context(1, CUTS[-1]))[0]
    assert (y[:1] - expected[:1]).abs().max() < BOUND
    assert (y[1:] - expected[1:]).abs().max() > 1e-3


def rounds_to(operator: Operator, bound: float, length: int = 37) -> None:
    """In bf16 it is as near to itself in fp64, in parts of its largest output, as is said."""
    half = copy.deepcopy(operator).bfloat16()
    exact = copy.deepcopy(half).double()
    u = normal(2, length, operator.width).bfloat16()
    with torch.no_grad():
        y = half(u, context(2, length, CUTS))
        wanted = exact(u.double(), context(2, length, CUTS))
    assert y.dtype == torch.bfloat16
    assert float((y.double() - wanted).abs().max() / wanted.abs().max()) < bound


def convolved(w: Tensor, taps: Tensor) -> Tensor:
    """y_t = Σ_j h[c, j]·w_{t−j}: w [length, width], a filter for each channel."""
    y = torch.zeros_like(w)
    for t in range(len(w)):
        for back in range(min(t + 1, taps.shape[1])):
            y[t] += taps[:, back] * w[t - back]
    return y


def for_channels(taps: Tensor, width: int) -> Tensor:
    """A filter for each group, as one for each channel."""
    return torch.stack([taps[channel * len(taps) // width] for channel in range(width)])


def featurized(operator: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Of a Hyena operator: q, and k ⊙ v."""
    z = convolved(u @ operator.qkv.weight.T, operator.featurizer.taps)
    q, k, v = z.split(operator.width, dim=-1)
    return q, k * v
