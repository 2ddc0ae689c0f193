"""Frozen parameters, for all engines: those of groups with a learning rate of 0.

They have neither gradients nor optimizer states, so the engine never sees them: they leave the
modules before the engine takes these, and return as buffers, whole on each rank in the compute
precision. Where that rounds them, the ranks share fp32 masters, which checkpoints hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ....models.config.options.precision import Precision
from ....models.config.precision import compute_dtype
from ....models.model.model import Model
from ....models.parallel.axes import Axis
from ....models.parallel.local_shard import LocalShard
from ...checkpoints.fragments import Fragment
from ...checkpoints.kinds import MASTER, keyed
from ...layout.groups import Parallel
from ..optimizers.base import ParameterGroup


class Frozen:
    """Parameters that no step changes. There may be none."""

    def __init__(
        self,
        model: Model,
        fp32: Collection[str],
        groups: Sequence[ParameterGroup],
        shards: Mapping[str, LocalShard],
        precision: Precision,
        parallel: Parallel,
    ) -> None:
        """Take the parameters out of a model on the meta device, and allocate them. `fp32` are
        those that must not be rounded."""
        self.model = model
        self.shards = shards
        self.axes: dict[str, Axis] = {}
        """Ranks that hold the same values, for each parameter."""
        self.weights: dict[str, Tensor] = {}
        self.masters: dict[str, Tensor] = {}
        """This rank's part of the fp32 masters of weights in half precision."""
        rounded = compute_dtype(precision) if precision.separate_masters else torch.float32
        names = [name for group in groups if group.frozen for name in group.names]
        for name in sorted(names):
            path, _, attribute = name.rpartition(".")
            parameter = model.get_submodule(path)._parameters.pop(attribute)
            assert parameter is not None
            axis = parallel.replicas if shards[name].experts else parallel.data
            kind = torch.float32 if name in fp32 else rounded
            self.axes[name] = axis
            self.weights[name] = torch.empty_like(parameter, dtype=kind, device=parallel.device)
            if kind != torch.float32:
                size = len(_part(parameter.numel(), axis, axis.rank))
                self.masters[name] = torch.empty(size, device=parallel.device)

    def give_back(self) -> None:
        """Return the parameters to the model, as buffers. Call when the engine has the others."""
        for name, weight in self.weights.items():
            path, _, attribute = name.rpartition(".")
            self.model.get_submodule(path).register_buffer(attribute, weight)

    def fragments(self) -> list[Fragment]:
        """Return the masters: live memory."""
        fragments = []
        for number, (name, weight) in enumerate(self.weights.items()):
            shard, axis = self.shards[name], self.axes[name]
            master, start, writes = weight.view(-1), 0, number % axis.size == axis.rank
            if name in self.masters:
                master, writes = self.masters[name], True
                start = _part(weight.numel(), axis, axis.rank).start
            if master.numel():
                writes = writes and shard.stored
                fragments.append(Fragment(keyed(MASTER, name), shard, start, master, writes))
        return fragments

    def loaded(self) -> None:
        """Round the masters into the weights, after they were written to. Collective over the
        ranks of each axis."""
        for name, master in self.masters.items():
            weight, axis = self.weights[name], self.axes[name]
            parts = [_part(weight.numel(), axis, rank) for rank in range(axis.size)]
            sent = weight.new_zeros(max(map(len, parts)))
            sent[: len(master)] = master
            gathered = [torch.empty_like(sent) for _ in parts]
            if axis.size == 1:
                gathered = [sent]
            else:
                dist.all_gather(gathered, sent, group=axis.group)
            whole = torch.cat([x[: len(part)] for x, part in zip(gathered, parts, strict=True)])
            weight.copy_(whole.view(weight.shape))


def _part(numel: int, axis: Axis, rank: int) -> range:
    """Return the elements of a parameter whose masters a rank holds."""
    size = -(-numel // axis.size)
    return range(min(rank * size, numel), min((rank + 1) * size, numel))
