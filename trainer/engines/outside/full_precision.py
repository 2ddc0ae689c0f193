"""Parameters that are fp32 beside weights of half precision, for all engines.

Operators name them (`Operator.full_precision`): rates of scans, decays, residues. They are few, so
each rank holds them whole, with gradients and optimizer states, and the engine never sees them:
they leave the modules before the engine takes these, and return as buffers, which neither DeepSpeed
nor FSDP2 shards or casts. Their gradients are summed over the data axis once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....models.model.model import Model
from ....models.parallel.axes import Axis
from ....models.parallel.local_shard import LocalShard
from ...checkpoints.fragments import Fragment
from ...layout.groups import Parallel
from ..optimizers.base import Optimizer, ParameterGroup
from ..optimizers.config import OptimizerConfig
from ..pieces import Piece, Pieces


class FullPrecision:
    """fp32 parameters that are their own masters. There may be none."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[ParameterGroup],
        config: OptimizerConfig,
        shards: Mapping[str, LocalShard],
        parallel: Parallel,
    ) -> None:
        """Take the parameters out of a model on the meta device, and allocate them."""
        self.model = model
        self.data: Axis = parallel.data
        self.parameters: dict[str, nn.Parameter] = {}
        own_groups = [group for group in groups if group.full_precision and not group.frozen]
        for name in sorted(name for group in own_groups for name in group.names):
            assert not shards[name].experts, "their gradients are summed over the data axis"
            path, _, own = name.rpartition(".")
            taken = model.get_submodule(path)._parameters.pop(own)
            assert taken is not None
            empty = torch.empty_like(taken, dtype=torch.float32, device=parallel.device)
            self.parameters[name] = nn.Parameter(empty)
        self.optimizer: Optimizer | None = None
        if own_groups:
            self.optimizer = config.build(model, own_groups, self.parameters)
            averaged = config.ema is not None
            self.pieces = Pieces(self.optimizer, shards, own_groups, averaged=averaged)

    def give_back(self) -> None:
        """Return the parameters to the model, as buffers. Call when the engine has the others."""
        for name, parameter in self.parameters.items():
            path, _, own = name.rpartition(".")
            self.model.get_submodule(path).register_buffer(own, parameter)

    def reduce(self, factor: float) -> None:
        """Sum the gradients over the data axis, and multiply them. Call once per step."""
        if self.data.size == 1 or not self.parameters:
            return
        gradients = self._gradients()
        total = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(total, group=self.data.group)
        parts = (total * factor).split([gradient.numel() for gradient in gradients])
        shaped = map(Tensor.view_as, parts, gradients)
        torch._foreach_copy_(gradients, list(shaped))

    def gradients(self) -> list[Fragment]:
        """Return the gradients: live memory."""
        if self.optimizer is None:
            return []
        flat = [gradient.view(-1) for gradient in self._gradients()]
        return self.pieces.gradients(self._pieces(), flat)

    def step(self, lr: float, finite: Tensor) -> None:
        """Apply the gradients where `finite`, and clear them."""
        if self.optimizer is not None:
            self.optimizer.set_lr(lr)
            self.optimizer.step_if(finite)
        self.discard()

    def discard(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def fragments(self) -> list[Fragment]:
        """Return masters and optimizer states: live memory."""
        return self.pieces.fragments(self._pieces()) if self.optimizer is not None else []

    def loaded(self, steps: int) -> None:
        if self.optimizer is not None:
            self.optimizer.loaded(steps)

    def _gradients(self) -> list[Tensor]:
        for parameter in self.parameters.values():
            if parameter.grad is None:  # unused: it still decays, as the others
                parameter.grad = torch.zeros_like(parameter)
        found = [parameter.grad for parameter in self.parameters.values()]
        return [gradient for gradient in found if gradient is not None]

    def _pieces(self) -> list[Piece]:
        """Return all parameters, whole; the ranks take turns in writing them."""
        return [
            Piece(
                name, parameter, 0, 0, parameter.numel(), number % self.data.size == self.data.rank
            )
            for number, (name, parameter) in enumerate(self.parameters.items())
        ]
