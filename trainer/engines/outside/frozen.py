"""Hold frozen parameters, whose groups have learning rate 0, for all engines.

They have neither gradients nor optimizer states, so the engine never sees them: they are removed
from the modules before the engine wraps these, and return as buffers, replicated on all ranks in
the compute precision. If that rounds them, the ranks shard fp32 masters, which checkpoints hold.
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
from ...checkpoints.kinds import MASTER, tensor_key
from ...layout.groups import Parallel
from ..optimizers.base import ParameterGroup


class Frozen:
    """Parameters without updates. There may be none."""

    def __init__(
        self,
        model: Model,
        fp32: Collection[str],
        groups: Sequence[ParameterGroup],
        shards: Mapping[str, LocalShard],
        precision: Precision,
        parallel: Parallel,
    ) -> None:
        """Remove the parameters from a model on the meta device, and allocate them. `fp32` names
        those that must not be rounded."""
        self.model = model
        self.shards = shards
        self.axes: dict[str, Axis] = {}
        """Ranks that hold the same values, by parameter."""
        self.weights: dict[str, Tensor] = {}
        self.masters: dict[str, Tensor] = {}
        """This rank's shards of the fp32 masters of rounded weights."""
        rounded = compute_dtype(precision) if precision.separate_masters else torch.float32
        names = [name for group in groups if group.frozen for name in group.names]
        for name in sorted(names):
            path, _, attribute = name.rpartition(".")
            parameter = model.get_submodule(path)._parameters.pop(attribute)
            assert parameter is not None
            axis = parallel.replicas if shards[name].experts else parallel.data
            dtype = torch.float32 if name in fp32 else rounded
            self.axes[name] = axis
            self.weights[name] = torch.empty_like(parameter, dtype=dtype, device=parallel.device)
            if dtype != torch.float32:
                size = len(_master_range(parameter.numel(), axis, axis.rank))
                self.masters[name] = torch.empty(size, device=parallel.device)

    def register_buffers(self) -> None:
        """Register the parameters as buffers of the model. Call after the engine has wrapped it."""
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
                start = _master_range(weight.numel(), axis, axis.rank).start
            if master.numel():
                writes = writes and shard.stored
                fragments.append(Fragment(tensor_key(MASTER, name), shard, start, master, writes))
        return fragments

    def loaded(self) -> None:
        """Round overwritten masters into the weights. Collective over the ranks of each axis."""
        for name, master in self.masters.items():
            weight, axis = self.weights[name], self.axes[name]
            ranges = [_master_range(weight.numel(), axis, rank) for rank in range(axis.size)]
            padded = weight.new_zeros(max(map(len, ranges)))
            padded[: len(master)] = master
            gathered = [torch.empty_like(padded) for _ in ranges]
            if axis.size == 1:
                gathered = [padded]
            else:
                dist.all_gather(gathered, padded, group=axis.group)
            pairs = zip(gathered, ranges, strict=True)
            flat = torch.cat([values[: len(elements)] for values, elements in pairs])
            weight.copy_(flat.view(weight.shape))


def _master_range(numel: int, axis: Axis, rank: int) -> range:
    """Return the range of elements whose masters a rank holds."""
    size = -(-numel // axis.size)
    return range(min(rank * size, numel), min((rank + 1) * size, numel))
