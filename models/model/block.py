"""A layer in the pattern, u ← u + mixer(norm(u)); u ← u + mlp(norm(u)) if it has an MLP.

An operator with `norm_placement: post` adds norm(mixer(u)), with `both` post_norm(mixer(norm(u))).

A shared block (Zamba) that feeds the layer adds to the mixer's input alone:

    u ← u + mixer(norm(u + call(shared, u)))

Mixers side by side (Falcon-H1) read one norm:

    n = norm(u);  u ← u + mixer(n) + second(n)

In a parallel layer (BlackMamba's `r8`) both branches read u:

    u ← u + mixer(norm(u)) + mlp(norm'(u))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from ..config.config import ModelConfig
from ..config.options.recompute import Rule, Selective
from ..config.pattern import Layer
from ..layers.initializers import Initializers
from ..layers.norms import Norm, build_norm
from ..layers.recompute import Recomputable
from ..operators import OPERATORS, BatchContext, Operator, SharedOperator, State
from ..parallel.tensor import gather, scatter


def build_operator(config: ModelConfig, name: str) -> Operator:
    options = config.operators[name]
    return OPERATORS[options.kind](options, config.width)


def scale(x: Tensor, multiplier: float) -> Tensor:
    """Multiply x, in no operation if by 1."""
    return x if multiplier == 1 else x * multiplier


class ResidualBranch(Recomputable):
    """norm → operator → norm: a branch that adds to the residual stream, with one norm or both."""

    stores: bool = False
    """True if the norm stores its rows in FP8 for the operator's input projection."""

    def __init__(self, config: ModelConfig, name: str, second: str | None = None) -> None:
        super().__init__()
        options = config.operators[name]
        names = [name] if second is None else [name, second]
        self.multipliers = [config.operators[operator].multipliers for operator in names]
        arguments = (config.norm, config.width, config.norm_eps, config.kernel)
        self.norm = build_norm(*arguments) if options.norm_placement != "post" else None
        self.operator = build_operator(config, name)
        self.second = build_operator(config, second) if second is not None else None
        self.post_norm = build_norm(*arguments) if options.norm_placement != "pre" else None

    def forward(
        self,
        u: Tensor,
        batch: BatchContext,
        states: Sequence[State | None],
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sum u + added [b, local_length, width], the branch's output for it, with the
        same shape, and this rank's share of the auxiliary losses [b], None without any. The norm
        computes the sum, because its kernel adds the sum's gradient to its own."""
        axes = self.operator.axes(batch.axes)
        axis, call = axes.tensor, batch.call_context(states[0], axes)
        before, after = self.multipliers[0]
        if self.norm is None:
            u = normed = u if added is None else u + added
        elif self.stores and axis.size == 1:  # else rows are gathered between norm and operator
            inputs = (u,) if added is None else (added, u)
            u, normed, quantized = self.norm(*inputs, store=True)
            call = replace(call, stored=quantized)
        elif added is not None:
            u, normed = self.norm(added, u)
        elif self.norm.fused(u):
            u, normed = self.norm(u, with_input=True)
        else:
            normed = self.norm(u)
        x = gather(normed, axis)
        y = self.operator(scale(x, before), call)
        if self.second is not None:
            second_call = replace(call, state=states[1])
            second_before, second_after = self.multipliers[1]
            second = self.second(scale(x, second_before), second_call)
            y, after = scale(y, after) + scale(second, second_after), 1.0
        y = scatter(y, axis)
        y = scale(y if self.post_norm is None else self.post_norm(y), after)
        if not call.losses:
            return u, y, None
        losses = sum(call.losses, start=u.new_zeros(len(u), dtype=torch.float32))
        return u, y, losses / batch.axes.tensor.size

    @property
    def operators(self) -> list[Operator]:
        """The operator, and the one beside it."""
        return [self.operator] if self.second is None else [self.operator, self.second]

    @property
    def norms(self) -> list[Norm]:
        """Norms before and after the operator."""
        return [norm for norm in (self.norm, self.post_norm) if norm is not None]

    def init_weights(self, init: Initializers) -> None:
        for norm in self.norms:
            init.norm(norm)
        for operator in self.operators:
            operator.init_weights(init)


class Block(Recomputable):
    """A layer in the pattern."""

    def __init__(
        self, config: ModelConfig, layer: Layer, shared: SharedOperator | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.call = shared.new_call() if shared is not None else None
        self.mixer = ResidualBranch(config, layer.mixer, layer.second)
        self.mlp = ResidualBranch(config, layer.mlp) if layer.mlp else None

    def forward(
        self,
        u: Tensor,
        batch: BatchContext,
        states: Sequence[State] | None = None,
        shared: SharedOperator | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after the layer, like u [b, local_length, width], and the
        summed auxiliary losses [b], None without any. local_length is length / tp."""
        state = iter(states) if states is not None else repeat(None)
        mixer_input = u
        if self.call is not None:
            mixer_input = u + self.call(shared, u, batch.call_context(next(state)))
        mixer_states = [next(state) for _ in self.mixer.operators]
        total, y, losses = self.mixer(mixer_input, batch, mixer_states)
        if self.call is None:
            u = total
        if self.mlp is not None:
            if self.layer.parallel:
                u, mlp_output, mlp_losses = self.mlp(u, batch, [next(state)])
                y = y + mlp_output
            else:
                u, y, mlp_losses = self.mlp(u, batch, [next(state)], y)
            losses = add_losses(losses, mlp_losses)
        return u + y, losses

    def operators(self) -> list[Operator]:
        """Return the operators of all branches, as `layer.branches` names them."""
        return [operator for branch in self.branches() for operator in branch.operators]

    def branches(self) -> list[ResidualBranch]:
        return [self.mixer] if self.mlp is None else [self.mixer, self.mlp]

    def set_recompute(self, rule: Rule) -> None:
        self.saved = rule if isinstance(rule, Selective) else None
        self.recompute = rule == "block" or self.saved is not None
        for module in (self.call, *self.branches()):
            if module is not None:
                module.recompute = rule == "operator"

    def new_states(self, capacity: int) -> list[State]:
        """Create a state for every operator call in this layer."""
        calls = len(self.operators()) + (self.call is not None)
        return [State(capacity) for _ in range(calls)]

    def init_weights(self, init: Initializers) -> None:
        if self.call is not None:
            self.call.init_weights(init)
        for branch in self.branches():
            branch.init_weights(init)


def add_losses(losses: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Add auxiliary losses [b]; None stands for none, and costs no launch."""
    if losses is None or more is None:
        return losses if more is None else more
    return losses + more
