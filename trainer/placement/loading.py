"""Load a rank's share of a model: by tensor parallelism a slice, by FSDP2 a shard of each tensor.

FSDP2 gathers a block before it runs, and frees it afterwards; embedding, head, final norm and
shared blocks stay gathered from the first batch on. A rank reads what it holds, a tensor at a time.
"""

from __future__ import annotations

from ...models.accounting.count import build_meta
from ...models.model.model import Model
from ...models.parallel.axes import Axes
from ...models.transforms.fp8 import quantize
from ..checkpoints.fragments import Fragment
from ..checkpoints.kinds import MASTER, tensor_key
from ..engines.pieces import local
from ..engines.shard_groups import ShardGrid
from ..layout.devices import local_device
from ..layout.groups import Parallel
from ..weights.source import WeightSource
from .placement import Placement

ENTRIES = ("hidden", "loss", "logits")
"""Methods of the model that FSDP2 treats as forward passes."""


def load_model(weights: WeightSource, placement: Placement, parallel: Parallel | None) -> Model:
    """Load this rank's share onto its device. Collective over the ranks of `parallel`; None: a
    single process."""
    model = quantize(build_meta(weights.model), placement.precision.fp8)
    model.shard(Axes() if parallel is None else parallel.axes)
    model.cast(placement.precision)
    model.requires_grad_(False)
    grid = None
    if parallel is not None and placement.shard > 1:
        grid = shard_weights(model, placement, parallel)
    model.to_empty(device=local_device(placement.device))
    if grid is not None:
        from ...models.layers.fp8_gather import gather_matrices

        gather_matrices(model)
    fragments = [
        Fragment(
            tensor_key(MASTER, name),
            model.local_shards[name],
            0 if grid is None else grid.first_element(parameter),
            local(parameter).view(-1),
        )
        for name, parameter in model.named_parameters()
    ]
    weights.fill(fragments, None if parallel is None else parallel.control)
    return model.eval()


def shard_weights(model: Model, placement: Placement, parallel: Parallel) -> ShardGrid:
    """Shard a model on the meta device over `placement.shard` ranks, block by block."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    data, tensor = parallel.data.size, parallel.axes.tensor.size
    grid = ShardGrid(placement.device, data, placement.shard, tensor)
    for block in model.typed_blocks():
        fully_shard(block, mesh=grid.mesh, reshard_after_forward=True)
    fully_shard(model, mesh=grid.mesh, reshard_after_forward=False)
    for entry in ENTRIES:
        register_fsdp_forward_method(model, entry)
    return grid
