"""A layer: u ← u + mixer(norm(u)), then u ← u + mlp(norm(u)) where there is an MLP."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig
from .documents import Documents
from .initialise import Initialiser
from .norms import build_norm
from .operators import OPERATORS, Context, Operator, State
from .pattern import Layer

Checkpointing = Literal["none", "operator", "block"]


def build_operator(config: ModelConfig, name: str) -> Operator:
    options = config.operators[name]
    return OPERATORS[options.kind](options, config.width)


class Branch(nn.Module):
    """norm → operator: what is added to the residual stream."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.norm = build_norm(config.norm, config.width, config.norm_eps)
        self.operator = build_operator(config, name)

    def forward(
        self, u: Tensor, positions: Tensor, documents: Documents | None, state: State | None
    ) -> tuple[Tensor, Tensor]:
        """The branch, and the sum of its auxiliary losses."""
        context = Context(positions, documents, state)
        y = self.operator(self.norm(u), context)
        return y, sum(context.losses, start=u.new_zeros((), dtype=torch.float32))

    def init_weights(self, init: Initialiser) -> None:
        init.norm(self.norm)
        self.operator.init_weights(init)


class Block(nn.Module):
    """One layer of the pattern."""

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        self.mixer = Branch(config, layer.mixer)
        self.mlp = Branch(config, layer.mlp) if layer.mlp else None

    def forward(
        self,
        u: Tensor,
        positions: Tensor,
        documents: Documents | None = None,
        states: list[State] | None = None,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`recompute` keeps only the input of each branch for the backward pass."""
        losses = u.new_zeros((), dtype=torch.float32)
        for number, branch in enumerate(self.branches()):
            state = states[number] if states is not None else None
            if recompute:
                y, loss = checkpoint(branch, u, positions, documents, state, use_reentrant=False)
            else:
                y, loss = branch(u, positions, documents, state)
            u = u + y
            losses = losses + loss
        return u, losses

    def branches(self) -> list[Branch]:
        return [self.mixer] if self.mlp is None else [self.mixer, self.mlp]

    def init_weights(self, init: Initialiser) -> None:
        for branch in self.branches():
            branch.init_weights(init)
