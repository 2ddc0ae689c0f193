"""Pools of processes that share the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks.ranks import Ranks
from torch import Tensor

WORK = Path(__file__).with_name("work.py")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, WORK)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4, WORK)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def pools(two_ranks: Ranks, four_ranks: Ranks) -> dict[int, Ranks]:
    return {2: two_ranks, 4: four_ranks}


@pytest.fixture(scope="session")
def differs() -> Callable[..., float]:
    return greatest_difference


def greatest_difference(
    ranks: Ranks,
    function: str,
    whole: Callable[..., Tensor],
    inputs: list[Tensor],
    *arguments: Any,
    divided: list[bool] | None = None,
) -> float:
    """Greatest difference between a function of work.py on parts of its inputs and `whole` on all
    of them: of the output, and of the gradients of the inputs. Undivided inputs are replicated."""
    divided = divided or [True] * len(inputs)
    leaves = [item.clone().requires_grad_() for item in inputs]
    y = whole(*leaves)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)
    expected = torch.autograd.grad((y * probe).sum(), leaves)
    arrays = [item.numpy() for item in inputs]
    answers = ranks.run("part_of", function, arrays, divided, probe.numpy(), *arguments)
    worst = max_difference(
        np.concatenate([part for part, _ in answers], axis=1), y.detach().numpy()
    )
    for number, (gradient, cut) in enumerate(zip(expected, divided, strict=True)):
        result = [gradients[number] for _, gradients in answers]
        joined = np.concatenate(result, axis=1) if cut else sum(result)
        worst = max(worst, max_difference(joined, gradient.numpy()))
    return worst


def max_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))
