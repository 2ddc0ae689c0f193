"""Which parameters are matrices of projections, for optimizers that treat matrices as such."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from .config import ModelConfig
from .layers.linear import SplitLinear
from .model import Model
from .operators import Operator
from .operators.base import Call


class Matrices(NamedTuple):
    """The projections that one parameter [..., rows, columns] holds."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    rows: tuple[int, ...]
    """Rows of each projection, one behind the other: `qkv.weight` holds three."""

    @property
    def cost(self) -> float:
        """Multiplications of a product of each matrix with its transpose."""
        *stack, _, columns = self.shape
        products = sum(min(rows, columns) ** 2 * max(rows, columns) for rows in self.rows)
        return float(math.prod(stack) * products)


def matrices(config: ModelConfig) -> dict[str, Matrices]:
    """Return the parameters that hold projections of operators, by name.

    Embeddings, the head, norms, biases, filters and the networks behind filters hold none.
    """
    with torch.device("meta"):
        model = Model(config)
    found: dict[str, Matrices] = {}
    for path, owner in model.named_modules():
        if isinstance(owner, Operator | Call):
            for name, rows in _projections(owner).items():
                shape = tuple(owner.get_parameter(name).shape)
                found[f"{path}.{name}"] = Matrices(shape, rows)
    return found


def _projections(owner: Operator | Call) -> dict[str, tuple[int, ...]]:
    found = dict(owner.stacks()) if isinstance(owner, Operator) else {}
    once = owner.once if isinstance(owner, Operator) else ()
    for path, module in owner.named_modules():
        if path.split(".")[0] in once:
            continue
        if isinstance(module, SplitLinear):
            found[f"{path}.weight"] = tuple(module.parts.values())
        elif isinstance(module, nn.Linear):
            found[f"{path}.weight"] = (len(module.weight),)
    return found
