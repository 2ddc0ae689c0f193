"""A layer: u ← u + mixer(norm(u)), then u ← u + mlp(norm(u)) where there is an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig
from .documents import Documents
from .initializers import Initialiser
from .layers.norms import build_norm
from .operators import OPERATORS, Context, Operator, SharedOperator, State
from .parallel.axes import Axes
from .parallel.tensor import gather, scatter
from .pattern import Layer

Checkpointing = Literal["none", "operator", "block"]


def build_operator(config: ModelConfig, name: str) -> Operator:
    options = config.operators[name]
    return OPERATORS[options.kind](options, config.width)


@dataclass(frozen=True)
class Where:
    """What every operator of a batch is told."""

    positions: Tensor
    documents: Documents | None
    embeddings: Tensor | None
    rows: Tensor | None = None
    axes: Axes = field(default_factory=Axes)

    def context(self, state: State | None) -> Context:
        return Context(
            self.positions,
            self.documents,
            state,
            rows=self.rows,
            embeddings=self.embeddings,
            axes=self.axes,
        )


class ResidualBranch(nn.Module):
    """norm → operator: what is added to the residual stream."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.norm = build_norm(config.norm, config.width, config.norm_eps, config.kernel)
        self.operator = build_operator(config, name)

    def forward(
        self, u: Tensor, where: Where, state: State | None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u with what was `added` to it; the branch of that; and the sum of its auxiliary losses,
        this process's share of it."""
        context, axis = where.context(state), where.axes.tensor
        u, normal = (u, self.norm(u)) if added is None else self.norm(added, u)
        y = scatter(self.operator(gather(normal, axis), context), axis)
        losses = sum(context.losses, start=u.new_zeros((), dtype=torch.float32))
        return u, y, losses / axis.size

    def init_weights(self, init: Initialiser) -> None:
        init.norm(self.norm)
        self.operator.init_weights(init)


class Block(nn.Module):
    """One layer of the pattern."""

    def __init__(
        self, config: ModelConfig, layer: Layer, shared: SharedOperator | None = None
    ) -> None:
        super().__init__()
        self.call = shared.new_call() if shared is not None else None
        self.mixer = ResidualBranch(config, layer.mixer)
        self.mlp = ResidualBranch(config, layer.mlp) if layer.mlp else None

    def forward(
        self,
        u: Tensor,
        where: Where,
        states: Sequence[State] | None = None,
        shared: SharedOperator | None = None,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The stream, and the sum of auxiliary losses.

        `recompute` keeps only the input of each branch for the backward pass.
        """
        own = iter(states) if states is not None else repeat(None)
        fed = u
        if self.call is not None:
            fed = u + self.run(recompute, self.feed, u, where, next(own), shared)
        _, y, losses = self.run(recompute, self.mixer, fed, where, next(own))
        if self.mlp is not None:  # the sum and its norm are one kernel
            u, y, loss = self.run(recompute, self.mlp, u, where, next(own), y)
            losses = losses + loss
        return u + y, losses

    def feed(self, u: Tensor, where: Where, state: State | None, shared: SharedOperator) -> Tensor:
        assert self.call is not None
        fed: Tensor = self.call(shared, u, where.context(state))
        return fed

    def run(self, recompute: bool, function: Callable[..., Any], *arguments: Any) -> Any:
        if recompute:
            return checkpoint(function, *arguments, use_reentrant=False)
        return function(*arguments)

    def branches(self) -> list[ResidualBranch]:
        return [self.mixer] if self.mlp is None else [self.mixer, self.mlp]

    def new_states(self, capacity: int) -> list[State]:
        """One for each operator that is called here."""
        calls = len(self.branches()) + (self.call is not None)
        return [State(capacity) for _ in range(calls)]

    def init_weights(self, init: Initialiser) -> None:
        if self.call is not None:
            self.call.init_weights(init)
        for branch in self.branches():
            branch.init_weights(init)
