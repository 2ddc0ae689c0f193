"""Train parameters that stay fp32 in a model of half precision, for all engines.

Operators name them (`Operator.full_precision`): rates of scans, decays, residues. They are few, so
all ranks hold them unsharded, with gradients and optimizer states. The engine never sees them: they
are removed from the modules before the engine wraps these, and return as buffers, which neither
DeepSpeed nor FSDP2 shards or casts. Gradients are summed over the data axis once per step.
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
from ..pieces import FragmentBuilder, ParameterPiece


class FullPrecision:
    """fp32 parameters, which are also the masters. There may be none."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[ParameterGroup],
        config: OptimizerConfig,
        shards: Mapping[str, LocalShard],
        parallel: Parallel,
    ) -> None:
        """Remove the parameters from a model on the meta device, and allocate them."""
        self.model = model
        self.data: Axis = parallel.data
        self.parameters: dict[str, nn.Parameter] = {}
        fp32_groups = [group for group in groups if group.full_precision and not group.frozen]
        for name in sorted(name for group in fp32_groups for name in group.names):
            assert not shards[name].experts, "their gradients are summed over the data axis"
            path, _, attribute = name.rpartition(".")
            meta = model.get_submodule(path)._parameters.pop(attribute)
            assert meta is not None
            empty = torch.empty_like(meta, dtype=torch.float32, device=parallel.device)
            self.parameters[name] = nn.Parameter(empty)
        self.pieces = [  # ranks take turns in writing them
            ParameterPiece(
                name, parameter, 0, 0, parameter.numel(), number % self.data.size == self.data.rank
            )
            for number, (name, parameter) in enumerate(self.parameters.items())
        ]
        self.optimizer: Optimizer | None = None
        if fp32_groups:
            self.optimizer = config.build(model, fp32_groups, self.parameters)
            averaged = config.ema is not None
            self.fragment_builder = FragmentBuilder(
                self.optimizer, shards, fp32_groups, averaged=averaged
            )

    def register_buffers(self) -> None:
        """Register the parameters as buffers of the model. Call after the engine has wrapped it."""
        for name, parameter in self.parameters.items():
            path, _, attribute = name.rpartition(".")
            self.model.get_submodule(path).register_buffer(attribute, parameter)

    def reduce(self, factor: float) -> None:
        """Sum the gradients over the data axis, and multiply them by `factor`. Call once per
        step."""
        if self.data.size == 1 or not self.parameters:
            return
        gradients = self._gradients()
        total = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(total, group=self.data.group)
        sums = (total * factor).split([gradient.numel() for gradient in gradients])
        shaped_sums = map(Tensor.view_as, sums, gradients)
        torch._foreach_copy_(gradients, list(shaped_sums))

    def gradients(self) -> list[Fragment]:
        """Return the gradients: live memory."""
        if self.optimizer is None:
            return []
        flat = [gradient.view(-1) for gradient in self._gradients()]
        return self.fragment_builder.gradients(self.pieces, flat)

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
        return self.fragment_builder.fragments(self.pieces) if self.optimizer is not None else []

    def loaded(self, steps: int) -> None:
        if self.optimizer is not None:
            self.optimizer.loaded(steps)

    def _gradients(self) -> list[Tensor]:
        for parameter in self.parameters.values():
            if parameter.grad is None:  # an unused parameter still decays
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters.values()]
        return [gradient for gradient in gradients if gradient is not None]
