"""The engine of a rank that holds the whole state alone.

It has the arithmetic of FSDP2 on one rank, and the same bits: masters are rounded to weights once
after each update, and gradients are summed in fp32 over micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ....models.config.precision import compute_dtype
from ..groups import engine_groups, local_shards, parameter_groups
from ..optimizers.moving_average import MovingAverage
from ..outside.frozen import Frozen
from ..outside.full_precision import FullPrecision
from ..pieces import FragmentBuilder, ParameterPiece
from .whole_weights import WholeWeights

if TYPE_CHECKING:
    from ....models.config.options.precision import Precision
    from ...checkpoints.fragments import Fragment
    from ...layout.groups import Parallel
    from ..config import EngineConfig
    from ..objective import Objective, Sums
    from ..optimizers.config import OptimizerConfig


class OneRank:
    def __init__(
        self,
        config: EngineConfig,
        objective: Objective,
        optimizer: OptimizerConfig,
        precision: Precision,
        parallel: Parallel,
    ) -> None:
        model = objective.model
        fp32 = model.full_precision(precision)
        shards, all_groups = local_shards(model), parameter_groups(model, optimizer, fp32)
        groups = engine_groups(all_groups)
        self.frozen = Frozen(model, fp32, all_groups, shards, precision, parallel)
        self.fp32 = FullPrecision(model, all_groups, optimizer, shards, parallel)
        self.objective = objective
        self.device = parallel.device
        self.dtype = compute_dtype(precision)
        self.clip = optimizer.clip
        self.updates = 0
        for block in model.typed_blocks()[:1] if model.calls_shared(0) else ():
            if list(block.parameters()):  # of a later stage, the view changes nothing
                block.register_forward_pre_hook(_view_stream)
        config.compile_blocks(model, parallel.device)
        rounded = self.dtype if precision.separate_masters else None
        self.weights = WholeWeights(objective, rounded, parallel.device)
        self.fp32.register_buffers()
        self.frozen.register_buffers()
        self.parameters = self.weights.masters
        self.pieces = [
            ParameterPiece(name, parameter, begin=0, start=0, numel=parameter.numel(), writes=True)
            for name, parameter in self.parameters.items()
            if parameter.numel()
        ]
        self.optimizer = optimizer.build(model, groups, self.parameters)
        averaged = optimizer.ema is not None
        self.fragment_builder = FragmentBuilder(self.optimizer, shards, groups, averaged=averaged)
        self.average = MovingAverage(optimizer.ema, self.device)

    def __call__(self, *inputs: Any) -> Sums:
        sums: Sums = self.objective(*inputs)
        return sums

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()
        self.weights.add_pending()

    def gradients(self) -> list[Fragment]:
        for parameter in self.parameters.values():
            if parameter.grad is None:  # unused: it still decays
                parameter.grad = torch.zeros_like(parameter)
        gradients = [self.parameters[piece.parameter].grad for piece in self.pieces]
        flat = [gradient.view(-1) for gradient in gradients if gradient is not None]
        return self.fragment_builder.gradients(self.pieces, flat) + self.fp32.gradients()

    def step(self, lr: float, finite: torch.Tensor) -> None:
        self.optimizer.set_lr(lr)
        self.optimizer.step_if(finite)
        self.fp32.step(lr, finite)
        self.discard()
        self.weights.refresh()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.fp32.discard()

    def fragments(self) -> list[Fragment]:
        outside = self.fp32.fragments() + self.frozen.fragments()
        return self.fragment_builder.fragments(self.pieces) + outside

    def loaded(self, steps: int) -> None:
        self.updates = steps
        self.weights.refresh()
        self.optimizer.loaded(steps)
        self.fp32.loaded(steps)
        self.frozen.loaded()
        self.average.loaded(steps)


def _view_stream(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a block a view of its stream: what the block adds to the stream's gradient is summed
    before what others add, here the shared blocks to that of the embeddings. FSDP2's blocks with
    trained weights have views too, so the sums have the same order and the same bits."""
    stream, *further = inputs
    return (stream.view_as(stream), *further)
