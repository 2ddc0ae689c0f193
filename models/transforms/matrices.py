"""Parameters that hold projection matrices, for optimizers that treat matrices specially (Muon)."""

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
    """Projections in a parameter [..., rows, columns]."""

    shape: tuple[int, ...]
    """Unsharded parameter shape."""
    rows: tuple[int, ...]
    """Rows per projection, concatenated along dimension −2: `qkv.weight` holds three."""

    @property
    def cost(self) -> float:
        """Multiplications in the products M·Mᵀ."""
        *stack, _, columns = self.shape
        products = sum(min(rows, columns) ** 2 * max(rows, columns) for rows in self.rows)
        return float(math.prod(stack) * products)


def find_matrices(config: ModelConfig) -> dict[str, Matrices]:
    """Return the parameters that hold operators' projections, by name.

    Embeddings, the head, norms, biases, filters and the networks behind filters hold none.
    """
    with torch.device("meta"):
        model = Model(config)
    matrices: dict[str, Matrices] = {}
    for path, owner in model.named_modules():
        if isinstance(owner, Operator | SharedCall):
            for name, rows in _projections(owner).items():
                shape = tuple(owner.get_parameter(name).shape)
                matrices[f"{path}.{name}"] = Matrices(shape, rows)
    return matrices


def _projections(owner: Operator | SharedCall) -> dict[str, tuple[int, ...]]:
    """Return the rows per projection in an operator or call, by parameter name."""
    rows = dict(owner.stacks()) if isinstance(owner, Operator) else {}
    once = owner.once if isinstance(owner, Operator) else ()
    for path, module in owner.named_modules():
        if path.split(".")[0] in once:
            continue
        if isinstance(module, SplitLinear):
            rows[f"{path}.weight"] = tuple(module.parts.values())
        elif isinstance(module, nn.Linear) and len(module.weight) > 1:  # a single row is a vector
            rows[f"{path}.weight"] = (len(module.weight),)
    return rows
