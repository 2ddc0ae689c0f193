"""Parameters that are projection matrices, for optimizers that treat matrices specially (Muon)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from ..config.config import ModelConfig
from ..layers.linear import SplitLinear
from ..model.model import Model
from ..operators import Operator
from ..operators.base import SharedCall


class Matrices(NamedTuple):
    """The projections that one parameter [..., rows, columns] holds."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    rows: tuple[int, ...]
    """Rows of each projection, concatenated along dimension −2: `qkv.weight` holds three."""

    @property
    def cost(self) -> float:
        """Number of multiplications in the products of each matrix with its transpose."""
        *stack, _, columns = self.shape
        products = sum(min(rows, columns) ** 2 * max(rows, columns) for rows in self.rows)
        return float(math.prod(stack) * products)


def matrices(config: ModelConfig) -> dict[str, Matrices]:
    """Return the parameters that hold projections of operators, by name.

    Embeddings, the head, norms, biases, filters and the networks behind filters hold none.
    """
    with torch.device("meta"):
        model = Model(config)
    result: dict[str, Matrices] = {}
    for path, owner in model.named_modules():
        if isinstance(owner, Operator | SharedCall):
            for name, rows in _projections(owner).items():
                shape = tuple(owner.get_parameter(name).shape)
                result[f"{path}.{name}"] = Matrices(shape, rows)
    return result


def _projections(owner: Operator | SharedCall) -> dict[str, tuple[int, ...]]:
    """Rows of each projection of the operator or call, by parameter name."""
    rows = dict(owner.stacks()) if isinstance(owner, Operator) else {}
    once = owner.once if isinstance(owner, Operator) else ()
    for path, module in owner.named_modules():
        if path.split(".")[0] in once:
            continue
        if isinstance(module, SplitLinear):
            rows[f"{path}.weight"] = tuple(module.parts.values())
        elif isinstance(module, nn.Linear):
            rows[f"{path}.weight"] = (len(module.weight),)
    return rows
